"""The token that protects the page's buttons."""

from __future__ import annotations

import secrets
from pathlib import Path

from hubring.ps.core.errors import ConfigError
from hubring.ps.security import private_file
from hubring.ps.security.token_file import read_secret

OPTION = "--page-token-file"

SHORTEST = 16
"""Smallest number of characters; a shorter token could be guessed."""

_CONTENT = "the page's token"
_MAKE = "Make one with head -c 18 /dev/urandom | base64"


def settle(file: Path | None) -> str:
    """Returns the token in the file, or a random one.

    Raises:
        ConfigError: The file cannot be read, others can read it, or its token is too short.
    """
    if file is None:
        return secrets.token_urlsafe(18)
    if not private_file.exists(file, OPTION, _CONTENT):
        raise ConfigError(  # which does not repeat the name: it may be a token
            f"{OPTION} names a file that does not exist; pass the name of a file with a token. {_MAKE}"
        )
    token = read_secret(file, OPTION, f"delete it. {_MAKE}", _CONTENT).strip()
    if len(token) < SHORTEST:
        raise ConfigError(
            f"{OPTION} {file} has {len(token)} characters; a token needs at least {SHORTEST}. {_MAKE}"
        )
    return token


def same(given: str, token: str) -> bool:
    """Returns whether the tokens are equal. The time that it takes does not reveal where they differ."""
    return secrets.compare_digest(given.encode(), token.encode())

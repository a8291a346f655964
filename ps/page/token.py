"""The token that protects the page's buttons."""

from __future__ import annotations

import secrets
from pathlib import Path

from hubring.ps.core.errors import ConfigError
from hubring.ps.security.token_file import read_secret

SHORTEST = 16
"""Smallest number of characters; a shorter token could be guessed."""

_MAKE = "Make one with head -c 18 /dev/urandom | base64"


def settle(file: Path | None) -> str:
    """Returns the token in the file, or a random one.

    Raises:
        ConfigError: The file cannot be read, others can read it, or its token is too short.
    """
    if file is None:
        return secrets.token_urlsafe(18)
    token = read_secret(file, "--page-token-file", f"delete it. {_MAKE}").strip()
    if len(token) < SHORTEST:
        raise ConfigError(
            f"--page-token-file {file} has {len(token)} characters; a token needs at least {SHORTEST}."
            f" {_MAKE}"
        )
    return token


def same(given: str, token: str) -> bool:
    """Returns whether the tokens are equal. The time that it takes does not reveal where they differ."""
    return secrets.compare_digest(given.encode(), token.encode())

"""The token that guards what the page can do to a job."""

from __future__ import annotations

import secrets
from pathlib import Path

from hubring.ps.core.errors import ConfigError

SHORTEST = 16
"""Characters; fewer could be guessed."""


def settle(file: Path | None) -> str:
    """The token in the file, or a fresh one.

    Raises:
        ConfigError: The file cannot be read, or holds too short a token.
    """
    if file is None:
        return secrets.token_urlsafe(18)
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --token-file {file}: {error}") from error
    if len(token) < SHORTEST:
        raise ConfigError(
            f"--token-file {file} holds {len(token)} characters; a token has at least {SHORTEST}:"
            " head -c 18 /dev/urandom | base64 makes one"
        )
    return token


def same(given: str, token: str) -> bool:
    """Whether they are equal; how long that takes tells nothing of where they differ."""
    return secrets.compare_digest(given.encode(), token.encode())

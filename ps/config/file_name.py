"""Checks that a setting is the name of a file, and not its content, as in `PS_TOKEN_FILE="$(cat FILE)"`.

Law: no error message repeats what may be a secret.
"""

from __future__ import annotations

HIDDEN = "..."
"""Stands for a value in an error message."""

_SECRETS = ("hubring:", "-----BEGIN")
_MOST_BYTES, _MOST_IN_NAME = 4095, 255
"""PATH_MAX without its last byte, and NAME_MAX of all common file systems."""


def is_secret(text: str) -> bool:
    """Returns whether a text begins as a token, a private key or a certificate does."""
    return text.lstrip().startswith(_SECRETS)


def shown(value: object) -> object:
    """Returns a value for an error message: itself, unless it may be a secret."""
    return HIDDEN if isinstance(value, str) and (is_secret(value) or "\n" in value) else value


def objection(text: str) -> str:
    """Returns why a text cannot be the name of a file, and the fix, without the text; empty if it can."""
    parts = text.encode(errors="surrogateescape").split(b"/")
    if is_secret(text):
        why = "is the content of a file"
    elif "\n" in text or "\0" in text:
        why = "has several lines"
    elif len(text) > _MOST_BYTES or max(map(len, parts)) > _MOST_IN_NAME:
        why = "is too long for the name of a file"
    else:
        return ""
    return f"the value, which is not repeated here, {why}; pass the name of the file"

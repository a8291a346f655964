"""Signatures of messages, with a key that the processes of a job share."""

from __future__ import annotations

import hashlib
import hmac
import secrets

__all__ = [
    "DIGEST_LENGTH",
    "HOROVOD_SECRET_KEY",
    "SECRET_LENGTH",
    "check_digest",
    "compute_digest",
    "make_secret_key",
]

HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"  # noqa: S105 - the variable's name
SECRET_LENGTH = DIGEST_LENGTH = 32
"""Bytes."""


def make_secret_key() -> bytes:
    """Returns a random key."""
    return secrets.token_bytes(SECRET_LENGTH)


def compute_digest(key: bytes, message: bytes) -> bytes:
    """Returns the message's HMAC with SHA-256."""
    return hmac.digest(key, message, hashlib.sha256)


def check_digest(key: bytes, message: bytes, digest: bytes) -> bool:
    """Whether the digest is that of the message, compared in constant time."""
    return hmac.compare_digest(compute_digest(key, message), digest)

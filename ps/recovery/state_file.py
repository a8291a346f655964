"""A file that holds one state of a server, for the process that takes over.

Law: a reader finds a whole state or none. The first line has the digest of the rest. A rename replaces the
file, which is not flushed to the disk: it must survive the death of a process, not of the host. Only its user
can read it, because it has the secrets of the server and its members.
"""

from __future__ import annotations

import contextlib
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from hubring.ps.core.errors import HubringError
from hubring.ps.recovery.records import State
from hubring.ps.security import private_file

_KIND = "hubring-state-1"


class StateDamaged(HubringError):
    """The state of a server that was killed cannot be read."""

    exit_code = 69


class StateFile:
    """The file of one server.

    Args:
        path: Where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, state: bytes) -> None:
        """Replaces the state. Raises OSError if it cannot be written."""
        private_file.replace(self.path, f"{_KIND} {_digest(state)}\n".encode() + state)

    def read(self) -> State:
        """Returns the state.

        Raises:
            StateDamaged: The file is missing, torn or changed.
        """
        try:
            head, _, body = self.path.read_bytes().partition(b"\n")
            if head != f"{_KIND} {_digest(body)}".encode():
                raise ValueError("its digest differs")
            return decode(body)
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            raise StateDamaged(
                f"cannot take over the server: {self.path} is missing or damaged ({error}). Restart the"
                " server with the same --checkpoint-dir, then restart the workers"
            ) from error

    def remove(self) -> None:
        """Deletes the state, or at least what the file holds."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self.path, 0)


def encode(value: object) -> bytes:
    """Returns a record as JSON, which has integers of any size: incarnations have 192 bits."""
    return msgspec.json.encode(value, enc_hook=_plain)


def decode(data: bytes) -> State:
    """Returns the state of `encode`. Raises ValueError if it is none."""
    return msgspec.json.decode(data, type=State, dec_hook=_typed)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else list(value)


def _typed(kind: type[Any], value: Any) -> Any:
    return kind(value)


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()

"""What makes ZeroMQ's messages fit to leave a process. `keyed_seal` has another kind."""

from __future__ import annotations

from typing import Protocol

from hubring.ps.transport.base import MAX_HEADER, Message
from hubring.ps.transport.checksum import MAX_SEALED, opened, sealed

MAX_EXTRA = 24
"""Maximum bytes that a seal adds to a header."""

MAX_FIRST_PART = max(MAX_SEALED, MAX_HEADER + MAX_EXTRA)
"""Maximum bytes of a message's first part."""


class Seal(Protocol):
    """Prepares the messages of one end of a connection, and checks those of its other end."""

    def seal(self, message: Message) -> bytes:
        """Returns the message's first part; the payload follows as it is."""

    def open(self, first: bytes, payload: memoryview | None) -> Message:
        """Returns the message of a first part and a payload.

        Raises:
            DamagedHeader: Nothing in the message can be trusted.
        """


class Checksums:
    """A seal without a key: it finds damage, but no forgery."""

    def seal(self, message: Message) -> bytes:
        return sealed(message)

    def open(self, first: bytes, payload: memoryview | None) -> Message:
        return opened(first, payload)

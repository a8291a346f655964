"""The interface of every transport, and the checksums over the messages that leave a process.

A transport moves messages: a short header and at most one payload. It does not interpret
them. Each request gets one reply. The reply may land in memory that the requester names,
so that shared memory returns parameters without a copy.

Threads: one thread at a time uses a Connection, but it can be a different thread each
time. Only the thread that opened a Listener uses it. Both have a `waitable` to poll, so
one thread can serve them all.

A bit that a cable, a network card or a switch turns can pass TCP's 16-bit sum. So a header ends with two
fields of data.proto: the payload's checksum, and the checksum of all header bytes before it. A reader checks
the header first, by itself, so that it can trust the number by which it asks for a payload again. Payloads
that stay in the host's memory, in shared memory or through a unix socket, have no checksum.

XXH3 misses a change once in 2^64. It reads 63 GB/s from a core's cache and 11 GB/s from memory, without the
GIL. CRC32C (google-crc32c) reads 28 GB/s from the cache. With checksums, 100 MiB there and back with ZeroMQ
over loopback took 4 % more CPU time (the fastest of 8 in turns, beside busy cores; 11 % in the median).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Protocol

from xxhash import xxh3_64_intdigest

from hubring.ps.security.access import NO_KEY_NEEDED, ShardKey
from hubring.ps.transport.window import Window

MAX_HEADER = 32 << 10
"""Maximum bytes of a header."""

MAX_PAYLOAD = 4 << 30
"""Maximum bytes of a payload. A peer that announces more is refused."""

ReturnPath = Any
"""Where a reply goes. Opaque: a Listener creates it and takes it back."""


@dataclass(slots=True)
class Message:
    """A message. `payload` is contiguous bytes (format "B") and can be empty."""

    header: bytes
    payload: memoryview | None = None
    landed: bool = False
    """Whether the payload is already in the requester's memory, so that no copy is needed."""
    priority: int = 0
    """The highest priority leaves first; among equals, the earliest message."""
    damage: str = ""
    """What does not match its checksum, as a clause; empty if all does. A damaged header is left out."""


_FIELD = struct.Struct("<HQ")
"""A fixed64 field: its tag of two bytes, and its value."""
_PAYLOAD_TAG, _HEADER_TAG = 0x01F1, 0x01F9  # fields 30 and 31, as protobuf writes them

MAX_SEALED = MAX_HEADER + 2 * _FIELD.size
"""Maximum bytes of a sealed header."""


class DamagedHeader(ValueError):
    """A header does not match its checksum, so nothing in it can be trusted."""


def sealed(message: Message, checked: bool = True) -> bytes:
    """Returns a message's header with its checksums. That of the payload is 0 unless it is `checked`."""
    header = message.header + _FIELD.pack(_PAYLOAD_TAG, _digest(message.payload) if checked else 0)
    return header + _FIELD.pack(_HEADER_TAG, xxh3_64_intdigest(header))


def verify_header(header: bytes) -> None:
    """Verifies a sealed header.

    Raises:
        DamagedHeader: It does not match its checksum.
    """
    body, field = header[: -_FIELD.size], header[-_FIELD.size :]
    if field != _FIELD.pack(_HEADER_TAG, xxh3_64_intdigest(body)):
        raise DamagedHeader(f"a header of {len(header)} bytes does not match its checksum")


def opened(header: bytes, payload: memoryview | None, checked: bool = True) -> Message:
    """Returns the message of a sealed header and a payload. One that is `checked` and wrong is left out.

    Raises:
        DamagedHeader: The header does not match its checksum.
    """
    verify_header(header)
    body, field = header[: -2 * _FIELD.size], header[-2 * _FIELD.size : -_FIELD.size]
    if checked and field != _FIELD.pack(_PAYLOAD_TAG, _digest(payload)):
        nbytes = 0 if payload is None else payload.nbytes
        return Message(body, damage=f"a payload of {nbytes} bytes does not match its checksum")
    return Message(body, payload)


def _digest(payload: memoryview | None) -> int:
    return xxh3_64_intdigest(b"" if payload is None else payload)


@dataclass(slots=True)
class Envelope:
    """A request as a Listener received it.

    The payload is valid at least until the reply has been sent.
    """

    message: Message
    reply_to: ReturnPath


class Connection(Protocol):
    """A worker's connection to one shard."""

    @property
    def waitable(self) -> int:
        """A file descriptor. Readable when `receive` has replies or an error."""

    def send(self, message: Message, into: memoryview | None = None) -> None:
        """Sends a request. Its payload and `into` belong to the transport until the reply arrives.

        `into` is where the reply's payload should land. A transport that cannot use it ignores
        it; a reply that landed there has `landed` set.

        Raises:
            ConnectionLost: The peer is gone. Connect again and resend.
        """

    def flush(self) -> None:
        """Sends what `send` may have buffered. Call it before the thread waits. Raises as `send`."""

    def receive(self) -> list[Message]:
        """Returns all replies that have arrived, in any order. Never blocks.

        Raises:
            ConnectionLost: The peer is gone, and all earlier replies have been returned.
        """

    def close(self) -> None:
        """Closes the connection. Can be called twice."""


class Listener(Protocol):
    """A shard's end of all connections of one transport."""

    @property
    def address(self) -> str:
        """The address that workers on this or another host connect to, including the port."""

    @property
    def waitable(self) -> int:
        """A file descriptor. Readable when `receive` has requests."""

    def receive(self) -> list[Envelope]:
        """Returns all requests that have arrived. Never blocks, and never fails because of one peer."""

    def send(self, reply_to: ReturnPath, message: Message, stable: bool) -> None:
        """Answers a request. A lost peer is no error: its lease expires.

        Unless `stable`, the payload may change as soon as this returns. A transport that
        sends later must copy it.
        """

    def flush(self) -> None:
        """Sends what `send` may have buffered. Call it before the thread waits."""

    def close(self) -> None:
        """Stops listening, closes all connections and removes the address from the host."""


class Transport(Protocol):
    """One kind of transport, as used by one process."""

    name: str

    def listen(self, place: str) -> Listener:
        """Opens a listener on a free port of a host (or a name of its own), or on a unix socket at a path."""

    def dial(self, address: str, timeout: float, key: ShardKey = NO_KEY_NEEDED) -> Connection:
        """Connects to a Listener's address within `timeout` seconds; `key` is the listener's.

        Raises:
            ServerUnreachable: No listener answers there with this transport.
        """

    def allocate(self, nbytes: int) -> memoryview:
        """Returns writable zeroed memory, aligned to 64 bytes, from which this transport sends fastest.

        Other memory can be sent too, but may cost a copy. The memory lives as long as a view of it.
        """

    def window(self, nbytes: int) -> Window:
        """Returns zeroed memory for replies to land in.

        A transport may map a peer's `stable` memory there instead of copying it.
        """

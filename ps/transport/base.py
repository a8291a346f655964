"""The interface of every transport.

A transport moves messages: a short header and at most one payload. It does not interpret
them. Each request gets one reply. The reply may land in memory that the requester names,
so that shared memory returns parameters without a copy.

Threads: one thread at a time uses a Connection, but it can be a different thread each
time. Only the thread that opened a Listener uses it. Both have a `waitable` to poll, so
one thread can serve them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from hubring.ps.security.shard_key import NO_KEY_NEEDED, ShardKey
from hubring.ps.transport.memory.window import Window

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

    def listen(self, host: str) -> Listener:
        """Opens a listener on a free port (or name) of `host`."""

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

"""The interface of every wire.

A transport moves messages: a short header and at most one payload. It does not
know what they mean. Each request gets one reply, which may land in memory that
the requester named: that is how shared memory returns parameters without a copy.

Threads: a Connection is used by one thread at a time, which may be another each
time, a Listener by the thread that opened it. Both are polled through `waitable`,
so that one thread serves them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

MAX_HEADER = 32 << 10
"""Bytes of one header, at most."""

MAX_PAYLOAD = 4 << 30
"""Bytes of one payload, at most; a peer that announces more is not believed."""

ReturnPath = Any
"""Where a reply goes; made by a Listener, handed back to it, opaque in between."""


@dataclass(slots=True)
class Message:
    """One message; `payload` is contiguous bytes (format "B"), possibly empty."""

    header: bytes
    payload: memoryview | None = None
    landed: bool = False
    """The payload lies in the memory that its requester named: no copy is left to do."""
    priority: int = 0
    """Where messages wait for one wire, the highest goes first, and of equals the earliest."""


@dataclass(slots=True)
class Envelope:
    """A request as a Listener received it.

    The payload stays valid at least until the reply to this request was sent.
    """

    message: Message
    reply_to: ReturnPath


class Connection(Protocol):
    """A worker's end of the line to one shard."""

    @property
    def waitable(self) -> int:
        """A file descriptor; readable when `receive` has something to say."""

    def send(self, message: Message, into: memoryview | None = None) -> None:
        """Sends a request. Its payload, and `into`, belong to the transport until the reply is there.

        `into` is where the reply's payload should land; only a transport that
        reaches it from afar uses it (the reply then says `landed`).

        Raises:
            ConnectionLost: The peer is gone. Dial again, send again.
        """

    def flush(self) -> None:
        """Lets out what `send` may have collected; called before the thread waits. Raises as `send`."""

    def receive(self) -> list[Message]:
        """All replies that are here, in any order; never blocks.

        Raises:
            ConnectionLost: The peer is gone, and all replies before that were handed out.
        """

    def close(self) -> None:
        """Ends the connection; may be called twice."""


class Listener(Protocol):
    """A shard's end of all lines of one transport."""

    @property
    def address(self) -> str:
        """What a worker on this or another host dials, the port filled in."""

    @property
    def waitable(self) -> int:
        """A file descriptor; readable when `receive` has something."""

    def receive(self) -> list[Envelope]:
        """All requests that are here; never blocks, and never fails for one peer's sake."""

    def send(self, reply_to: ReturnPath, message: Message, stable: bool) -> None:
        """Answers a request. A peer that is gone is no error: its lease will tell.

        Unless `stable`, the payload may change as soon as this returns, so a
        transport that sends later must copy first.
        """

    def flush(self) -> None:
        """Lets out what `send` may have collected; called before the thread waits."""

    def close(self) -> None:
        """Stops listening, drops all peers, removes what the address left on the host."""


class Transport(Protocol):
    """One kind of wire, as one process uses it."""

    name: str

    def listen(self, host: str) -> Listener:
        """Opens a listener on a free port (or name) of `host`."""

    def dial(self, address: str, timeout: float) -> Connection:
        """Connects to a Listener's address within `timeout` seconds.

        Raises:
            ServerUnreachable: Nothing answers there by this transport.
        """

    def allocate(self, nbytes: int) -> memoryview:
        """Writable zeroed memory, aligned to 64 bytes, from which this transport sends at its best.

        Memory from elsewhere can be sent too, at the price of a copy where this
        transport wants its own. It lives as long as a view of it does.
        """

    def window(self, nbytes: int) -> memoryview:
        """Memory like `allocate`'s in which replies are to land, and nothing is sent from.

        A transport that can may show a peer's `stable` memory there rather than
        copy it. What this process writes there is its own, and lasts until the
        next reply lands on it.
        """

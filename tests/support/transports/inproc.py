"""A transport with both ends in one process, for tests and for a hub in the same process.

Payloads are passed by reference where the interface allows it.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass
from typing import TypeVar

from hubring.ps.core.errors import ConnectionLost, ServerUnreachable
from hubring.ps.security.access import NO_KEY_NEEDED, ShardKey
from hubring.ps.transport.base import Envelope, Message, ReturnPath
from hubring.ps.transport.mapping import Arena, land, plain_memory
from hubring.ps.transport.polling import Bell
from hubring.ps.transport.window import Window, Windows

_T = TypeVar("_T")


class InprocConnection:
    """A worker's end. The listener's thread puts replies into its inbox."""

    def __init__(self, listener: InprocListener) -> None:
        self._listener = listener
        self._inbox: deque[Message] = deque()
        self._bell = Bell()
        self.waitable = self._bell.waitable
        self._lost = False

    def send(self, message: Message, into: memoryview | None = None) -> None:
        if self._lost:
            raise self._loss()
        self._listener.put(Envelope(message, _ReturnPath(self, into)))

    def flush(self) -> None:
        """Does nothing, since nothing is buffered."""

    def receive(self) -> list[Message]:
        self._bell.clear()
        lost = self._lost  # read before the inbox, because nothing is put into the inbox once this is set
        messages = _take_all(self._inbox)
        if lost:
            self._bell.ring()
            if not messages:
                raise self._loss()
        return messages

    def _loss(self) -> ConnectionLost:
        return ConnectionLost(f"{self._listener.address}: connection lost (closed)")

    def put(self, message: Message) -> None:
        """Called by the listener with a reply."""
        self._inbox.append(message)
        self._bell.ring()

    def lose(self) -> None:
        """Called by the listener when no more replies follow."""
        self._lost = True
        self._bell.ring()

    def close(self) -> None:
        self._lost = True
        self._listener.forget(self)
        self._bell.close()


@dataclass(slots=True)
class _ReturnPath:
    connection: InprocConnection
    into: memoryview | None


class InprocListener:
    """A shard's end; one inbox holds the requests of all connections."""

    def __init__(self, address: str, transport: InprocTransport) -> None:
        self.address = address
        self._transport = transport
        self._inbox: deque[Envelope] = deque()
        self._bell = Bell()
        self.waitable = self._bell.waitable
        self._peers: set[InprocConnection] = set()

    def flush(self) -> None:
        """Does nothing, since nothing is buffered."""

    def receive(self) -> list[Envelope]:
        self._bell.clear()
        return _take_all(self._inbox)

    def send(self, reply_to: ReturnPath, message: Message, stable: bool) -> None:
        payload = land(message.payload, reply_to.into)
        landed = payload is not None
        if payload is None and message.payload is not None:
            payload = message.payload if stable else memoryview(bytearray(message.payload))
        reply_to.connection.put(Message(message.header, payload, landed))

    def close(self) -> None:
        self._transport.forget(self.address)
        for connection in list(self._peers):
            connection.lose()
        self._bell.close()

    def put(self, envelope: Envelope) -> None:
        """Called by a connection with a request."""
        self._inbox.append(envelope)
        self._bell.ring()

    def accept(self) -> InprocConnection:
        """Called by a dialling connection."""
        connection = InprocConnection(self)
        self._peers.add(connection)
        return connection

    def forget(self, connection: InprocConnection) -> None:
        """Called by a closing connection."""
        self._peers.discard(connection)


class InprocTransport:
    """One instance is one network, which both ends share."""

    name = "inproc"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, InprocListener] = {}
        self._numbers = itertools.count()
        self._windows = Windows(Arena())

    def listen(self, host: str) -> InprocListener:
        with self._lock:
            address = f"inproc://{host}-{next(self._numbers)}"
            self._listeners[address] = InprocListener(address, self)
            return self._listeners[address]

    def forget(self, address: str) -> None:
        """Called by a closing listener."""
        with self._lock:
            self._listeners.pop(address, None)

    def dial(self, address: str, timeout: float, key: ShardKey = NO_KEY_NEEDED) -> InprocConnection:
        with self._lock:
            if address not in self._listeners:
                raise ServerUnreachable(f"nothing listens at {address} in this process")
            return self._listeners[address].accept()

    def allocate(self, nbytes: int) -> memoryview:
        return plain_memory(nbytes)

    def window(self, nbytes: int) -> Window:
        return self._windows.allocate(nbytes, populate=False)


def _take_all(inbox: deque[_T]) -> list[_T]:
    """Returns the current items in order; another thread can append at the same time."""
    return [inbox.popleft() for _ in range(len(inbox))]

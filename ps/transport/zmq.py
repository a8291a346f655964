"""ZeroMQ over TCP: the wire between hosts. ZeroMQ's own threads move the bytes.

A worker's DEALER talks to a shard's ROUTER in multipart messages: header, then
the payload if there is one. Neither end copies a payload: frames are sent from
the caller's memory, and handed out as the memory they arrived in.
"""

from __future__ import annotations

import logging
import select
import threading
import time

import zmq
from zmq.utils.monitor import parse_monitor_message

from ps.errors import ConfigError, ConnectionLost, ServerUnreachable
from ps.transport.base import MAX_PAYLOAD, Envelope, Message, ReturnPath
from ps.transport.bell import Bell
from ps.transport.host import bracketed, numeric, reachable
from ps.transport.memory import plain_memory

log = logging.getLogger(__name__)

HEARTBEAT_MS = 3_000
SILENCE_MS = 12_000
"""A host that vanished without a word is given up after this long; a process that died, at once."""

AT_ONCE = 64
"""Requests taken before replies get their turn."""

LAST_WORDS_MS = 1_000
"""How long a closing listener tries to bring its last replies out."""

_NEVER_MS = 2**31 - 1

_BROKEN = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ZmqTransport:
    """ZeroMQ's sockets of one process; its I/O thread runs only while one is open."""

    name = "zmq"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._open = 0

    def listen(self, host: str) -> ZmqListener:
        return ZmqListener(self, host)

    def dial(self, address: str, timeout: float) -> ZmqConnection:
        connection = ZmqConnection(self, address)
        try:
            connection.await_handshake(timeout)
        except ServerUnreachable:
            connection.close()
            raise
        return connection

    def allocate(self, nbytes: int) -> memoryview:
        return plain_memory(nbytes)

    def window(self, nbytes: int) -> memoryview:
        return self.allocate(nbytes)

    def open_socket(self, kind: int) -> zmq.Socket[bytes]:
        """A socket that never drops a message for want of room, and is closed in an instant."""
        with self._lock:
            if self._context is None:
                self._context = zmq.Context()
            self._open += 1
            socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0  # a ROUTER at its mark drops; the requests under way are the bound
        socket.maxmsgsize = MAX_PAYLOAD
        socket.heartbeat_ivl = HEARTBEAT_MS
        socket.heartbeat_timeout = SILENCE_MS
        return socket

    def close_socket(self, socket: zmq.Socket[bytes]) -> None:
        """Closes it, and with the last one the context."""
        if socket.closed:
            return
        with self._lock:
            socket.close()
            self._open -= 1
            if self._open == 0 and self._context is not None:
                self._context.term()
                self._context = None


class ZmqConnection:
    """A DEALER and its monitor, which tells of the connection's end even while nothing is sent.

    ZeroMQ's descriptors are edge-triggered: one falls silent when any call on
    its socket has looked, though messages may be left. `receive` therefore
    takes all, and `send` rings a bell when it leaves some.
    """

    def __init__(self, transport: ZmqTransport, address: str) -> None:
        self._transport = transport
        self._address = address
        self._lost = ""
        self._dealer = transport.open_socket(zmq.DEALER)
        self._dealer.ipv6 = "[" in address
        self._dealer.reconnect_ivl = _NEVER_MS  # who answers there next knows nothing of our requests
        self._monitor = self._dealer.get_monitor_socket(_BROKEN | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._bell = Bell()
        self._epoll = select.epoll()
        for waitable in (_descriptor(self._dealer), _descriptor(self._monitor), self._bell.waitable):
            self._epoll.register(waitable, select.EPOLLIN)
        self._waitable = self._epoll.fileno()

    @property
    def waitable(self) -> int:
        return self._waitable

    def await_handshake(self, timeout: float) -> None:
        """Connects, and returns once the peer has spoken ZeroMQ's protocol.

        Raises:
            ServerUnreachable: It has not within `timeout` seconds.
        """
        try:
            self._dealer.connect(self._address)
        except zmq.ZMQError as error:
            raise ServerUnreachable(f"{self._address} is no address for ZeroMQ: {error}") from error
        deadline = time.monotonic() + timeout
        while self._monitor.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return
            raise ServerUnreachable(f"nobody listens at {self._address} ({zmq.Event(event).name})")
        raise ServerUnreachable(f"nothing at {self._address} spoke ZeroMQ within {timeout:g} s")

    def send(self, message: Message, into: memoryview | None = None) -> None:
        if self._lost:
            raise ConnectionLost(f"{self._address} {self._lost}; dial again")
        payload = [] if message.payload is None else [message.payload]
        self._dealer.send_multipart([message.header, *payload], zmq.NOBLOCK, copy=False)
        if _has_message(self._dealer):
            self._bell.ring()

    def flush(self) -> None:
        """Nothing is held back."""

    def receive(self) -> list[Message]:
        self._bell.clear()
        lost = self._lost or self._look_for_loss()  # before the messages: all that came earlier are there
        messages = list(iter(self._receive_one, None))
        if lost:
            self._lost = lost
            self._bell.ring()
            if not messages:
                raise ConnectionLost(f"{self._address} {lost}; dial again")
        return messages

    def _receive_one(self) -> Message | None:
        try:
            frames = self._dealer.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return Message(frames[0].bytes, frames[1].buffer if len(frames) > 1 else None)

    def _look_for_loss(self) -> str:
        lost = ""
        while _has_message(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if event & _BROKEN:
                lost = f"broke off ({zmq.Event(event).name})"
        return lost

    def close(self) -> None:
        self._epoll.close()
        self._bell.close()
        if not self._dealer.closed:
            self._dealer.disable_monitor()
            self._monitor.close()
            self._transport.close_socket(self._dealer)


class ZmqListener:
    """A ROUTER. What it sends to a worker that is gone, it drops: that is ZeroMQ's default, and ours."""

    def __init__(self, transport: ZmqTransport, host: str) -> None:
        self._transport = transport
        here = numeric(host)
        self._router = transport.open_socket(zmq.ROUTER)
        self._router.linger = LAST_WORDS_MS
        self._router.ipv6 = ":" in here
        try:
            self._router.bind(f"tcp://{bracketed(here)}:*")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen on {host} by ZeroMQ ({error}); is it ours?") from error
        port = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self._address = f"tcp://{bracketed(reachable(here))}:{port}"

    @property
    def address(self) -> str:
        return self._address

    @property
    def waitable(self) -> zmq.Socket[bytes]:
        return self._router

    def flush(self) -> None:
        """Nothing is held back."""

    def receive(self) -> list[Envelope]:
        envelopes = []
        for _ in range(AT_ONCE):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            if len(frames) in (2, 3):
                payload = frames[2].buffer if len(frames) == 3 else None
                envelopes.append(Envelope(Message(frames[1].bytes, payload), frames[0].bytes))
            else:
                log.warning("dropped a message of %d parts: a request has one or two", len(frames) - 1)
        return envelopes

    def send(self, reply_to: ReturnPath, message: Message, stable: bool) -> None:
        parts: list[bytes | memoryview] = [reply_to, message.header]
        if message.payload is not None:
            parts.append(message.payload if stable else bytes(message.payload))
        self._router.send_multipart(parts, zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        self._transport.close_socket(self._router)


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

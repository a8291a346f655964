"""ZeroMQ over TCP: the transport between hosts. ZeroMQ's own threads move the bytes.

A worker's DEALER exchanges multipart messages with a shard's ROUTER: a header, then the payload if there is
one. Neither end copies a payload: frames are sent from the caller's memory unless they are encrypted, and
received payloads stay in ZeroMQ's memory. A worker of one shard has a second DEALER for replies, which first
sends a proof.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import threading
import time

import zmq
from zmq.utils.monitor import parse_monitor_message

from hubring.ps.core.bounds import Rejections
from hubring.ps.core.errors import ConnectionLost, ServerUnreachable
from hubring.ps.security.access import NO_KEY_NEEDED, ShardKey, ShardLock
from hubring.ps.transport.base import DamagedHeader, Message
from hubring.ps.transport.host import duplicate
from hubring.ps.transport.mapping import Arena, plain_memory
from hubring.ps.transport.outbox import WINDOW, Outbox
from hubring.ps.transport.polling import Bell, poller
from hubring.ps.transport.window import Window, Windows
from hubring.ps.transport.zmq.listener import FULL, ZmqListener, seal_of
from hubring.ps.transport.zmq.socket import (
    FOR_REPLIES,
    HANDSHAKE_RECEIVED,
    LINGER_MS,
    NAME_BYTES,
    NOW,
    PROOF,
    QUESTION,
    SCHEME,
    Sockets,
    counts,
    descriptor_of,
    has_message,
    message_of,
    pass_to_zmq,
    put,
    receive,
)

_NEVER_MS = 2**31 - 1

ATTEMPTS = 5
"""How often a worker connects: a shard that strangers flood may close a connection in its handshake."""
_ATTEMPT_PAUSE = 0.1
"""Seconds before the second attempt; doubled before each further one. By chance up to half more or less."""

_PROOF_LOOK_MS = 2
"""How often a worker looks at what a peer has sent before its proof."""

_NONCE_BYTES = 16

_BROKEN = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ZmqTransport:
    """The ZeroMQ transport of one process.

    Args:
        apart: Whether replies use a separate connection, so that each end has one thread per direction.
        lock: Guards the listeners; None: they are open.
        rejections: Counts what a listener refuses.
    """

    name = "zmq"

    def __init__(
        self, *, apart: bool = False, rejections: Rejections | None = None, lock: ShardLock | None = None
    ) -> None:
        self._apart = apart
        self._lock = lock
        self._rejections = rejections or Rejections()
        self._windows = Windows(Arena())
        self._sockets = Sockets()

    def listen(self, place: str) -> ZmqListener:
        return ZmqListener(place, self._rejections, self._lock)

    def dial(self, address: str, timeout: float, key: ShardKey = NO_KEY_NEEDED) -> ZmqConnection:
        deadline = time.monotonic() + timeout
        for attempt in range(ATTEMPTS):
            connection = ZmqConnection(self._sockets, address, key, apart=self._apart)
            try:
                connection.await_handshake(deadline - time.monotonic())
            except ServerUnreachable as error:
                connection.close()
                if not isinstance(error, _Dropped) or attempt == ATTEMPTS - 1 or time.monotonic() > deadline:
                    raise
                time.sleep(_ATTEMPT_PAUSE * 2**attempt * (0.5 + secrets.randbelow(100) / 100))
            else:
                break
        return connection

    def allocate(self, nbytes: int) -> memoryview:
        return plain_memory(nbytes)

    def window(self, nbytes: int) -> Window:
        return self._windows.allocate(nbytes, populate=True)


class _Dropped(ServerUnreachable):
    """A process listens, and closed the connection before the end of the handshake."""


class ZmqConnection:
    """A worker's end: one lane for all messages, or one for requests and one for replies.

    ZeroMQ's descriptors are edge-triggered: any call on a socket resets its descriptor, even if messages are
    left. Code that leaves messages therefore rings a bell.
    """

    def __init__(self, sockets: Sockets, address: str, key: ShardKey, *, apart: bool) -> None:
        self._address = address
        self._lost = ""
        self._drain_timer: threading.Timer | None = None
        """Runs from the loss of one lane until no more is expected on the other."""
        self._drain_ended = False
        self._bell = Bell()
        self._outbox: Outbox[Message] = Outbox(self._bell.ring, WINDOW)
        # ZeroMQ's own routing ids begin with a zero.
        name = secrets.token_bytes(NAME_BYTES).replace(b"\0", b"\1")
        self._lanes = [_Lane(sockets, address, name, key)]
        if apart:
            self._lanes.append(_Lane(sockets, address, name + FOR_REPLIES, key))
        watched = [descriptor for lane in self._lanes for descriptor in lane.descriptors]
        self._epoll = poller(*watched, self._bell.waitable)
        self.waitable = self._epoll.fileno()

    def await_handshake(self, timeout: float) -> None:
        """Connects. Returns once the peer has completed the handshake, and has proved to be the shard.

        Raises:
            ServerUnreachable: There was no handshake or no proof within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        for lane in self._lanes:  # one by one: ZeroMQ assigns each to the thread with the fewest connections
            if not lane.connect(deadline):
                raise ServerUnreachable(f"no ZeroMQ handshake with {self._address} within {timeout:g} s")
            if lane.proves and not lane.prove(deadline):
                raise ServerUnreachable(
                    f"{self._address} did not prove within {timeout:.1f} s that it is the shard"
                )
        for lane in self._lanes[1:]:
            lane.dealer.send(lane.seal.seal(PROOF)[0], NOW)
        self._bell.ring()  # a monitor that was not read to its end signals no more events

    def send(self, message: Message, into: memoryview | None = None) -> None:
        if lost := self._lost or self._lanes[0].lost:
            raise ConnectionLost(f"{self._address}: connection lost ({lost})")
        put(message, self._outbox)

    def flush(self) -> None:
        requests = self._lanes[0]
        while not requests.lost and (message := self._outbox.take()) is not None:
            pass_to_zmq(message, self._outbox, requests.dealer, requests.seal)
        if any(has_message(lane.dealer) for lane in self._lanes):
            self._bell.ring()

    def receive(self) -> list[Message]:
        self._bell.clear()
        # Check first: messages from before a loss have arrived.
        lost = self._look_for_loss()
        messages: list[Message] = []
        try:
            for lane in self._lanes:
                messages.extend(message_of(frames, lane.seal) for frames in receive(lane.dealer))
        except DamagedHeader as error:  # which request it answers is unknown
            lost = str(error)
        self.flush()
        if lost:
            self._lost = lost
            self._bell.ring()
            if not messages:
                raise ConnectionLost(f"{self._address}: connection lost ({lost})")
        return messages

    def _look_for_loss(self) -> str:
        """Returns how the connection ended, as a clause, or an empty string while replies may come."""
        for lane in self._lanes:
            lane.look_for_loss()
        lost = [lane.lost for lane in self._lanes if lane.lost]
        if not lost or len(lost) == len(self._lanes) or self._drain_ended:
            return "".join(lost[:1])
        # An ending shard closes an idle lane first, and may still reply on the other.
        if self._drain_timer is None:
            self._drain_timer = threading.Timer(2 * LINGER_MS / 1000, self._expect_no_more)
            self._drain_timer.daemon = True
            self._drain_timer.start()
        return ""

    def _expect_no_more(self) -> None:
        """Runs in the timer's thread."""
        self._drain_ended = True
        self._bell.ring()

    def close(self) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer.join()
        self._epoll.close()
        self._bell.close()
        for lane in self._lanes:
            lane.close()


class _Lane:
    """A DEALER and its monitor, which reports a loss even while nothing is sent."""

    def __init__(self, sockets: Sockets, address: str, name: bytes, key: ShardKey) -> None:
        self._sockets = sockets
        self._address = address
        self.lost = ""
        """How the lane ended, as a clause; empty while it is open."""
        self.seal = seal_of(key, name, itertools.count(), serves=False, checked=address.startswith(SCHEME))
        host = address.removeprefix(SCHEME).rpartition(":")[0].strip("[]")
        self.dealer = sockets.open(zmq.DEALER, host)
        self.dealer.routing_id = name
        self.dealer.ipv6 = "[" in address
        if key.access.secret:
            nonce = secrets.token_hex(_NONCE_BYTES).encode()
            self.dealer.plain_username, self.dealer.plain_password = nonce, key.password(nonce)
        self.dealer.reconnect_ivl = _NEVER_MS  # a new listener at this address does not have our requests
        self._monitor = self.dealer.get_monitor_socket(
            _BROKEN | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self._line: socket.socket | None = None
        """Another descriptor of the connection, until the peer has proved to be the shard."""
        self.proves = bool(key.data_key)
        self.descriptors = descriptor_of(self.dealer), descriptor_of(self._monitor)

    def connect(self, deadline: float) -> bool:
        """Returns whether the peer completes the handshake before `deadline`.

        Raises:
            ServerUnreachable: The handshake failed.
        """
        try:
            self.dealer.connect(self._address)
        except zmq.ZMQError as error:
            raise ServerUnreachable(f"invalid ZeroMQ address {self._address}: {error}") from error
        while self._monitor.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            message = parse_monitor_message(self._monitor.recv_multipart())
            if message["event"] != zmq.EVENT_CONNECTED:
                self._check_handshake(zmq.Event(message["event"]), message["value"])
                return True
            if self.proves:
                with contextlib.suppress(OSError):  # the connection has ended
                    self._line = duplicate(message["value"])
        return False

    def _check_handshake(self, event: zmq.Event, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == FULL:
            raise ServerUnreachable(f"{self._address} takes no further connection; restart the job")
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise ServerUnreachable(f"{self._address} is another job's: it refused this worker's token")
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            raise _Dropped(f"{self._address} closed the connection before the end of ZeroMQ's handshake")
        if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            raise ServerUnreachable(f"no process listens at {self._address} ({event.name})")

    def prove(self, deadline: float) -> bool:
        """Returns whether the peer answers a question with the key of the seal before `deadline`.

        Nothing else is sent before: a process that took the port of a dead shard would read gradients. It may
        send little before, as ZeroMQ would store any number of parts.

        Raises:
            ServerUnreachable: The peer does not know the key, or the connection was lost.
        """
        self.dealer.send(QUESTION, NOW)
        waiting = zmq.Poller()
        waiting.register(self.dealer, zmq.POLLIN)
        waiting.register(self._monitor, zmq.POLLIN)
        while self.dealer not in dict(waiting.poll(_PROOF_LOOK_MS)):
            self.look_for_loss()
            if self.lost:
                raise _Dropped(f"{self._address}: connection lost ({self.lost}) before the shard's proof")
            if self._line is not None and counts(self._line).received > HANDSHAKE_RECEIVED:
                break
            if time.monotonic() > deadline:
                return False
        if not self._has_proof():
            raise ServerUnreachable(
                f"{self._address} is not the shard's any more: the process there does not know its key"
            )
        self._close_line()
        return True

    def _has_proof(self) -> bool:
        """Returns whether the peer sent `PROOF` and no more."""
        messages = list(receive(self.dealer))
        try:
            return len(messages) == 1 and message_of(messages[0], self.seal) == PROOF
        except DamagedHeader:
            return False

    def look_for_loss(self) -> None:
        """Reads the monitor's events."""
        while has_message(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if event & _BROKEN:
                self.lost = str(zmq.Event(event).name)

    def _close_line(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def close(self) -> None:
        """Closes the connection. Can be called twice."""
        self._close_line()
        if not self.dealer.closed:
            self.dealer.disable_monitor()
            self._monitor.close()
            self._sockets.close(self.dealer)

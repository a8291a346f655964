"""ZeroMQ over TCP: the wire between hosts. ZeroMQ's own threads move the bytes.

A worker's DEALER talks to a shard's ROUTER in multipart messages: header, then
the payload if there is one. Neither end copies a payload: frames are sent from
the caller's memory, and handed out as the memory they arrived in. A worker of one
shard has a second DEALER for the replies: first of all it says that it is there.
"""

from __future__ import annotations

import secrets
import threading
import time

import zmq
from zmq.utils.monitor import parse_monitor_message

from hubring.ps.core.errors import ConnectionLost, ServerUnreachable
from hubring.ps.transport.base import Message
from hubring.ps.transport.bell import Bell
from hubring.ps.transport.memory import plain_memory
from hubring.ps.transport.outbox import WINDOW, Outbox
from hubring.ps.transport.poller import poller
from hubring.ps.transport.zmq.listener import ZmqListener
from hubring.ps.transport.zmq.socket import (
    FOR_REPLIES,
    LAST_WORDS_MS,
    NOW,
    SCHEME,
    Sockets,
    descriptor_of,
    hand_over,
    has_message,
    message_of,
    put,
    receive,
)

_NEVER_MS = 2**31 - 1

_HERE = b""
"""What a line for replies says: an empty header, and no more."""

_BROKEN = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ZmqTransport:
    """ZeroMQ, for one process.

    Args:
        apart: Replies come on a line of their own, so that each end has a thread for each direction.
    """

    name = "zmq"

    def __init__(self, *, apart: bool = False) -> None:
        self._apart = apart
        self._sockets = Sockets()

    def listen(self, host: str) -> ZmqListener:
        return ZmqListener(self._sockets, host)

    def dial(self, address: str, timeout: float) -> ZmqConnection:
        connection = ZmqConnection(self._sockets, address, apart=self._apart)
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


class ZmqConnection:
    """A worker's end: a lane for all, or one for requests and another for their replies.

    ZeroMQ's descriptors are edge-triggered: one falls silent when any call on
    its socket has looked, though messages may be left. Whatever leaves some
    therefore rings a bell.
    """

    def __init__(self, sockets: Sockets, address: str, *, apart: bool) -> None:
        self._address = address
        self._lost = ""
        self._patience: threading.Timer | None = None
        """Runs from when one line is gone, until nothing more is expected on the other."""
        self._patience_ended = False
        self._bell = Bell()
        self._outbox: Outbox[Message] = Outbox(self._bell.ring, WINDOW)
        name = secrets.token_bytes(16).replace(b"\0", b"\1")  # ZeroMQ's own names begin with a zero
        self._lanes = [_Lane(sockets, address, name)]
        if apart:
            self._lanes.append(_Lane(sockets, address, name + FOR_REPLIES))
        watched = [descriptor for lane in self._lanes for descriptor in lane.descriptors]
        self._epoll = poller(*watched, self._bell.waitable)
        self._waitable = self._epoll.fileno()

    @property
    def waitable(self) -> int:
        return self._waitable

    def await_handshake(self, timeout: float) -> None:
        """Connects, and returns once the peer has spoken ZeroMQ's protocol.

        Raises:
            ServerUnreachable: It has not within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        for lane in self._lanes:  # one by one: ZeroMQ's thread with the fewest lines gets the next
            if not lane.connect(deadline):
                raise ServerUnreachable(f"nothing at {self._address} spoke ZeroMQ within {timeout:g} s")
        for lane in self._lanes[1:]:
            lane.dealer.send(_HERE, NOW)
        self._bell.ring()  # who has looked at a monitor but not to its end is told of nothing more

    def send(self, message: Message, into: memoryview | None = None) -> None:
        if lost := self._lost or self._lanes[0].lost:
            raise ConnectionLost(f"{self._address} {lost}; dial again")
        put(message, self._outbox)

    def flush(self) -> None:
        requests = self._lanes[0]
        while not requests.lost and (message := self._outbox.take()) is not None:
            hand_over(message, self._outbox, requests.dealer)
        if any(has_message(lane.dealer) for lane in self._lanes):
            self._bell.ring()

    def receive(self) -> list[Message]:
        self._bell.clear()
        # First: all that came before a loss is there by now.
        lost = self._look_for_loss()
        messages = [message_of(frames) for lane in self._lanes for frames in receive(lane.dealer)]
        self.flush()
        if lost:
            self._lost = lost
            self._bell.ring()
            if not messages:
                raise ConnectionLost(f"{self._address} {lost}; dial again")
        return messages

    def _look_for_loss(self) -> str:
        """How the connection ended, as a clause; empty while replies may come."""
        for lane in self._lanes:
            lane.look_for_loss()
        lost = [lane.lost for lane in self._lanes if lane.lost]
        if not lost or len(lost) == len(self._lanes) or self._patience_ended:
            return "".join(lost[:1])
        # A shard that ends closes an idle line first, and may have last words on the other.
        if self._patience is None:
            self._patience = threading.Timer(2 * LAST_WORDS_MS / 1000, self._expect_no_more)
            self._patience.daemon = True
            self._patience.start()
        return ""

    def _expect_no_more(self) -> None:
        """The timer's thread."""
        self._patience_ended = True
        self._bell.ring()

    def close(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience.join()
        self._epoll.close()
        self._bell.close()
        for lane in self._lanes:
            lane.close()


class _Lane:
    """A DEALER and its monitor, which tells of the connection's end even while nothing is sent."""

    def __init__(self, sockets: Sockets, address: str, name: bytes) -> None:
        self._sockets = sockets
        self._address = address
        self.lost = ""
        """How it ended, as a clause; empty while it lasts."""
        host = address.removeprefix(SCHEME).rpartition(":")[0].strip("[]")
        self.dealer = sockets.open(zmq.DEALER, host)
        self.dealer.routing_id = name
        self.dealer.ipv6 = "[" in address
        self.dealer.reconnect_ivl = _NEVER_MS  # who answers there next knows nothing of our requests
        self._monitor = self.dealer.get_monitor_socket(_BROKEN | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.descriptors = descriptor_of(self.dealer), descriptor_of(self._monitor)

    def connect(self, deadline: float) -> bool:
        """Whether the peer has shaken hands by then.

        Raises:
            ServerUnreachable: It never will.
        """
        try:
            self.dealer.connect(self._address)
        except zmq.ZMQError as error:
            raise ServerUnreachable(f"{self._address} is no address for ZeroMQ: {error}") from error
        if not self._monitor.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            return False
        event = parse_monitor_message(self._monitor.recv_multipart())["event"]
        if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            raise ServerUnreachable(f"nobody listens at {self._address} ({zmq.Event(event).name})")
        return True

    def look_for_loss(self) -> None:
        """Reads what the monitor has to say."""
        while has_message(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if event & _BROKEN:
                self.lost = f"broke off ({zmq.Event(event).name})"

    def close(self) -> None:
        """Ends the connection; may be called twice."""
        if not self.dealer.closed:
            self.dealer.disable_monitor()
            self._monitor.close()
            self._sockets.close(self.dealer)

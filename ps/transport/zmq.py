"""ZeroMQ over TCP: the wire between hosts. ZeroMQ's own threads move the bytes.

A worker's DEALER talks to a shard's ROUTER in multipart messages: header, then
the payload if there is one. Neither end copies a payload: frames are sent from
the caller's memory, and handed out as the memory they arrived in. A worker of one
shard has a second DEALER for the replies: first of all it says that it is there.

ZeroMQ's own queues are first in, first out, and a ROUTER drops what they have
no room for. So messages wait in an `Outbox` for each line, by reference, and
ZeroMQ gets a few slices at a time: as it lets go of a payload, the next goes.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import zmq
from zmq.utils.monitor import parse_monitor_message

from ps.config.address import is_loopback
from ps.errors import ConfigError, ConnectionLost, ServerUnreachable
from ps.transport.base import MAX_PAYLOAD, Envelope, Message, ReturnPath
from ps.transport.bell import Bell
from ps.transport.heap import keep_freed_memory
from ps.transport.host import bracketed, numeric, reachable
from ps.transport.memory import plain_memory
from ps.transport.outbox import WINDOW, Outbox
from ps.transport.poller import poller

log = logging.getLogger(__name__)

HEARTBEAT_MS = 3_000
SILENCE_MS = 12_000
"""A host that vanished without a word is given up after this long; a process that died, at once."""

AT_ONCE = 8
"""Messages taken before what waits to be sent gets its turn."""

UNREAD = 8
"""Messages of one peer that ZeroMQ reads ahead; then the peer's own memory fills, not ours."""

READ_AHEAD = 1 << 20
"""Bytes of one line that the kernel takes in before ZeroMQ does; it may grant less (net.core.rmem_max).

Left to itself the kernel grows each line's buffer by its own count, and lines that share a link take shares
in proportion: under 1 Gbit/s one of four workers was 10 MiB ahead of another after 240, whose round everybody
waits for, and a step took 9 % longer. Alike, the shares are equal. It is what 25 Gbit/s bring in 0.3 ms.
"""

READ_AHEAD_AT_HOME = 2 << 20
"""The same of a line within one host, which shares no link: what costs there is to sleep and to be woken.

100 MiB there and back from two workers took 102 ms with 1 MiB, 94 with 2, 97 with 4 or as the kernel sizes
it, and from one 59, 54, 54 and 55 (medians of 30 in turns; plain sockets 80 and 47). Over links of 1 Gbit/s
colocated shards of two workers have 0.975 of the rate with 2 MiB, and 0.992 with 1 (two runs each).
"""

IO_THREADS = 2
"""Threads that move the bytes of a process, each for its share of the lines.

A thread that sends and receives does so in turn: replies fell behind requests, and came alone at the end of
a step. So where a process dials one shard, replies have a line of their own, and by that a thread at either
end. Measured on two cores, 100 MB there and back with the optimizer, against plain sockets in the same run:
that brings one worker from 1.34 to 1.21. With more shards there are lines for all threads: with two shards,
two threads, not one, bring two workers from 1.20 to 1.14, and reusing frames' pages (`ps.transport.heap`)
one worker from 1.23 to 1.09. A thread moves 2 GB/s each way. Larger TCP buffers change nothing.
"""

MOST_APART = 4096
"""Lines for replies that a listener knows, those of workers that have gone included."""

LAST_WORDS_MS = 1_000
"""How long a closing listener tries to bring its last replies out."""

_NEVER_MS = 2**31 - 1

# As plain numbers: pyzmq's enums take longer to combine than what they ask for takes to do.
_NOW, _NOW_AND_MORE, _READABLE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.POLLIN)

_SCHEME = "tcp://"

_FOR_REPLIES = b"<"
"""Ends the name of a line for replies; the rest is that of the line of their requests."""
_HERE = b""
"""What such a line says: an empty header, and no more."""

_BROKEN = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ZmqTransport:
    """ZeroMQ's sockets of one process; its I/O threads run only while one is open.

    Args:
        apart: Replies come on a line of their own, so that each end has a thread for each direction.
    """

    name = "zmq"

    def __init__(self, *, apart: bool = False) -> None:
        self._apart = apart
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._open = 0

    def listen(self, host: str) -> ZmqListener:
        return ZmqListener(self, host)

    def dial(self, address: str, timeout: float) -> ZmqConnection:
        connection = ZmqConnection(self, address, apart=self._apart)
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

    def open_socket(self, kind: int, host: str) -> zmq.Socket[bytes]:
        """A socket that drops no message for want of room, and is closed in an instant.

        Args:
            kind: ZeroMQ's.
            host: Where it listens, or dials.
        """
        with self._lock:
            if self._context is None:
                keep_freed_memory()
                self._context = zmq.Context(io_threads=IO_THREADS)
            self._open += 1
            socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = 0  # a ROUTER at its mark drops, and tells nobody when there is room: outboxes do
        socket.rcvhwm = UNREAD
        socket.maxmsgsize = MAX_PAYLOAD
        socket.rcvbuf = READ_AHEAD_AT_HOME if is_loopback(host) else READ_AHEAD
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
    """A worker's end: a lane for all, or one for requests and another for their replies.

    ZeroMQ's descriptors are edge-triggered: one falls silent when any call on
    its socket has looked, though messages may be left. Whatever leaves some
    therefore rings a bell.
    """

    def __init__(self, transport: ZmqTransport, address: str, *, apart: bool) -> None:
        self._address = address
        self._lost = ""
        self._patience: threading.Timer | None = None
        """Runs from when one line is gone, until nothing more is expected on the other."""
        self._patience_ended = False
        self._bell = Bell()
        self._outbox: Outbox[Message] = Outbox(self._bell.ring, WINDOW)
        name = secrets.token_bytes(16).replace(b"\0", b"\1")  # ZeroMQ's own names begin with a zero
        self._lanes = [_Lane(transport, address, name)]
        if apart:
            self._lanes.append(_Lane(transport, address, name + _FOR_REPLIES))
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
            lane.dealer.send(_HERE, _NOW)
        self._bell.ring()  # who has looked at a monitor but not to its end is told of nothing more

    def send(self, message: Message, into: memoryview | None = None) -> None:
        if lost := self._lost or self._lanes[0].lost:
            raise ConnectionLost(f"{self._address} {lost}; dial again")
        _put(message, self._outbox)

    def flush(self) -> None:
        requests = self._lanes[0]
        while not requests.lost and (message := self._outbox.take()) is not None:
            _hand_over(message, self._outbox, requests.dealer)
        if any(_has_message(lane.dealer) for lane in self._lanes):
            self._bell.ring()

    def receive(self) -> list[Message]:
        self._bell.clear()
        # First: all that came before a loss is there by now.
        lost = self._look_for_loss()
        messages = [_message(frames) for lane in self._lanes for frames in _receive(lane.dealer)]
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

    def __init__(self, transport: ZmqTransport, address: str, name: bytes) -> None:
        self._transport = transport
        self._address = address
        self.lost = ""
        """How it ended, as a clause; empty while it lasts."""
        host = address.removeprefix(_SCHEME).rpartition(":")[0].strip("[]")
        self.dealer = transport.open_socket(zmq.DEALER, host)
        self.dealer.routing_id = name
        self.dealer.ipv6 = "[" in address
        self.dealer.reconnect_ivl = _NEVER_MS  # who answers there next knows nothing of our requests
        self._monitor = self.dealer.get_monitor_socket(_BROKEN | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.descriptors = _descriptor(self.dealer), _descriptor(self._monitor)

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
        while _has_message(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if event & _BROKEN:
                self.lost = f"broke off ({zmq.Event(event).name})"

    def close(self) -> None:
        """Ends the connection; may be called twice."""
        if not self.dealer.closed:
            self.dealer.disable_monitor()
            self._monitor.close()
            self._transport.close_socket(self.dealer)


class ZmqListener:
    """A ROUTER, which reads from its workers in turn, one message of each.

    What it sends to a worker that is gone, it drops: that is ZeroMQ's default, and ours.
    """

    def __init__(self, transport: ZmqTransport, host: str) -> None:
        self._transport = transport
        here = numeric(host)
        self._ways_back: dict[bytes, bytes] = {}
        """Line for replies by line of requests, of workers that have them apart."""
        self._outboxes: dict[bytes, Outbox[Message]] = {}
        """By ZeroMQ's name for a worker's line, of those to which something is under way."""
        self._router = transport.open_socket(zmq.ROUTER, here)
        self._router.linger = LAST_WORDS_MS
        self._router.ipv6 = ":" in here
        self._bell = Bell()
        self._epoll = poller(_descriptor(self._router), self._bell.waitable)
        self._waitable = self._epoll.fileno()
        try:
            self._router.bind(f"{_SCHEME}{bracketed(here)}:*")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen on {host} by ZeroMQ ({error}); is it ours?") from error
        port = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self._address = f"{_SCHEME}{bracketed(reachable(here))}:{port}"

    @property
    def address(self) -> str:
        return self._address

    @property
    def waitable(self) -> int:
        return self._waitable

    def receive(self) -> list[Envelope]:
        self._bell.clear()
        for line, outbox in list(self._outboxes.items()):
            _transmit(outbox, self._router, line)
            if outbox.idle:
                del self._outboxes[line]
        envelopes = []
        for sender, *frames in _receive(self._router):
            if len(frames) > 2:
                log.warning("dropped a message of %d parts: a request has one or two", len(frames))
            elif len(frames) == 1 and not frames[0]:
                self._answer_apart(sender.bytes)
            else:
                line = sender.bytes
                envelopes.append(Envelope(_message(frames), self._ways_back.get(line, line)))
        self.flush()
        return envelopes

    def _answer_apart(self, line: bytes) -> None:
        """A line for replies is there; ZeroMQ does not tell when it has gone."""
        if len(self._ways_back) == MOST_APART:
            del self._ways_back[next(iter(self._ways_back))]  # who has it still is answered where it asks
        self._ways_back[line.removesuffix(_FOR_REPLIES)] = line

    def send(self, reply_to: ReturnPath, message: Message, stable: bool) -> None:
        if message.payload is not None and not stable:
            message = replace(message, payload=memoryview(bytes(message.payload)))
        if reply_to not in self._outboxes:
            self._outboxes[reply_to] = Outbox(self._bell.ring, WINDOW)
        _put(message, self._outboxes[reply_to])
        _transmit(self._outboxes[reply_to], self._router, reply_to)

    def flush(self) -> None:
        if _has_message(self._router):
            self._bell.ring()

    def close(self) -> None:
        if not self._router.closed:
            for line, outbox in self._outboxes.items():
                _transmit(outbox, self._router, line, at_any_rate=True)
            self._epoll.close()
            self._bell.close()
            self._transport.close_socket(self._router)


def _put(message: Message, outbox: Outbox[Message]) -> None:
    outbox.put(message, message.priority, 0 if message.payload is None else message.payload.nbytes)


def _transmit(
    outbox: Outbox[Message], router: zmq.Socket[bytes], line: bytes, *, at_any_rate: bool = False
) -> None:
    """Hands a ROUTER what there is room for on one of its lines."""
    while (message := outbox.take(at_any_rate=at_any_rate)) is not None:
        router.send(line, _NOW_AND_MORE)
        _hand_over(message, outbox, router)


def _hand_over(message: Message, outbox: Outbox[Message], socket: zmq.Socket[bytes]) -> None:
    if message.payload is None:
        socket.send(message.header, _NOW)
    else:
        socket.send(message.header, _NOW_AND_MORE)
        # A view that only ZeroMQ holds: when it lets go, the kernel has the bytes.
        # pyzmq copies payloads of less than 64 KiB: those have left at once.
        socket.send(outbox.watch(memoryview(message.payload)), _NOW, copy=False)


def _receive(socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """The messages that are here, AT_ONCE at most."""
    for _ in range(AT_ONCE):
        if not _has_message(socket):  # cheaper than to try and be told
            return
        frames = [socket.recv(_NOW, copy=False)]
        while frames[-1].more:
            frames.append(socket.recv(_NOW, copy=False))
        yield frames


def _message(frames: list[zmq.Frame]) -> Message:
    return Message(frames[0].bytes, frames[1].buffer if len(frames) > 1 else None)


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)

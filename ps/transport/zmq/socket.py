"""The ZeroMQ sockets of one process, how messages pass through them, and what the kernel counts of them.

Each message has a seal: checksums here, or the one of `keyed_seal` over TCP.

ZeroMQ's own queues are first in, first out, and a ROUTER drops messages when a queue is full. So messages
wait by reference in one `Outbox` per connection. ZeroMQ gets a few slices at a time: when it releases a
payload, the next one follows.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import zmq

from hubring.ps.config.values import is_loopback
from hubring.ps.transport.base import (
    MAX_HEADER,
    MAX_PAYLOAD,
    MAX_SEALED,
    DamagedHeader,
    Message,
    opened,
    sealed,
)
from hubring.ps.transport.mapping import copy, unset_memory
from hubring.ps.transport.outbox import Outbox

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

LARGEST = 32 << 20
"""Bytes. Larger blocks come from the kernel, smaller ones from the heap."""

TRIM_BYTES = 2 * LARGEST
"""Free bytes at the end of a heap above which they are returned to the kernel."""


@cache
def keep_freed_memory() -> None:
    """Makes this process reuse freed blocks instead of asking the kernel for zeroed pages.

    ZeroMQ allocates and frees messages by the megabyte. With glibc's initial thresholds their pages go
    back to the kernel and are faulted in again: 20,000 faults for 100 MB there and back. That took one
    worker of two shards from 1.09 to 1.23 times the time of plain sockets. glibc itself reaches these
    values once a block of LARGEST was freed. They hold for the whole process. A C library without
    `mallopt` is not changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGEST)
        mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)


MAX_EXTRA = 24
"""Maximum bytes that a seal adds to a header."""

MAX_FIRST_PART = max(MAX_SEALED, MAX_HEADER + MAX_EXTRA)
"""Maximum bytes of a message's first part."""


class Seal:
    """Prepares the messages of one end of a connection, and checks those of its other end.

    Without a key it finds damage, but no forgery.

    Args:
        checked: Whether payloads have checksums. They need none if they do not leave the host.
    """

    def __init__(self, checked: bool = True) -> None:
        self._checked = checked

    def seal(self, message: Message) -> tuple[bytes, memoryview | None]:
        """Returns the message's first part, and the payload as it travels."""
        return sealed(message, self._checked), message.payload

    def open(self, first: bytes, parts: list[memoryview]) -> Message:
        """Returns the message of a first part and those of its payload, which it may change.

        Raises:
            DamagedHeader: Nothing in the message can be trusted.
        """
        return opened(first, joined(parts), self._checked)


SCHEME, UNIX = "tcp://", "ipc://"

NAME_BYTES = 16
"""Bytes of the random routing id of a connection for requests."""

FOR_REPLIES = b"<"
"""Suffix of a reply connection's routing id. The rest is the request connection's id."""

QUESTION = b"?"
"""A message without a seal that asks a listener for its `PROOF`."""

PROOF = Message(b"")
"""An empty message whose seal proves its sender: a listener's answer, or the first on a reply connection.

Without the seal, a stranger who took a password could direct a worker's replies elsewhere.
"""

HEARTBEAT_MS = 3_000
SILENCE_MS = 12_000
"""A silent host is lost after this time. A dead process is noticed at once."""

HANDSHAKE_MS = 5_000
"""How long a new connection has for ZeroMQ's handshake."""

HANDSHAKE_RECEIVED = 16 << 10
"""Bytes that a client may send before its handshake ends. PLAIN takes 190."""

PART_BYTES = 4 << 20
"""Maximum bytes of a part of a message, and so of what a connection can fill before its handshake ends.

The largest slice that is sent in one part, and thus received without a copy, has so many bytes.
"""

MAX_PARTS = 2 + MAX_PAYLOAD // PART_BYTES
"""Maximum parts of a message as a ROUTER receives it: routing id, header, and those of the payload."""

MAX_BATCH = 8
"""Messages to receive before waiting messages are sent."""

READ_AHEAD_MESSAGES = 8
"""Messages of one peer that ZeroMQ reads ahead. Then the peer's memory fills instead of ours."""

READ_AHEAD = 1 << 20
"""Bytes of one connection that the kernel receives ahead of ZeroMQ. It may grant less (net.core.rmem_max).

By default the kernel grows each connection's buffer separately, and connections that share a link get
bandwidth in proportion. Over 1 Gbit/s one of four workers was 10 MiB ahead of another after 240 MiB. All wait
for the slowest, and a step took 9 % longer. With equal buffers the shares are equal. 25 Gbit/s deliver 1 MiB
in 0.3 ms.
"""

READ_AHEAD_LOCAL = 2 << 20
"""The same for a connection within one host, which shares no link. There sleeping and waking up cost most.

100 MiB there and back took two workers 102 ms with 1 MiB, 94 with 2, and 97 with 4 or the kernel's size. It
took one worker 59, 54, 54 and 55 ms (medians of 30 in turns; plain sockets 80 and 47). Over links of 1 Gbit/s
colocated shards of two workers reach 0.975 of the rate with 2 MiB and 0.992 with 1 MiB (two runs each).
"""

IO_THREADS = 2
"""Threads that move the bytes of a process. Each serves its share of the connections.

A thread sends and receives in turn: replies fell behind requests, and the last replies came alone at the end
of a step. So with one shard, replies have a separate connection, and a thread at each end. On two cores, 100
MB there and back with the optimizer took one worker 1.21 instead of 1.34 times the time of plain sockets.
With more shards there are connections for all threads. With two shards, two threads instead of one improve
two workers from 1.20 to 1.14, and reusing pages (`keep_freed_memory`) improves one worker from 1.23 to 1.09.
A thread moves 2 GB/s each way. Larger TCP buffers change nothing.
"""

LINGER_MS = 1_000
"""How long a closing listener tries to send its last replies."""

# Plain numbers: combining pyzmq's enums takes longer than the calls themselves.
NOW, NOW_AND_MORE, _READABLE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.POLLIN)


class Sockets:
    """Creates sockets. ZeroMQ's I/O threads run only while a socket is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._open = 0

    def open(self, kind: int, host: str) -> zmq.Socket[bytes]:
        """Returns a socket that never drops a message because a queue is full, and that closes at once.

        Args:
            kind: ZeroMQ's socket type.
            host: The host to listen on or connect to.
        """
        with self._lock:
            if self._context is None:
                keep_freed_memory()
                self._context = zmq.Context(io_threads=IO_THREADS)
            self._open += 1
            socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = (
            0  # a ROUTER at its limit drops messages and does not report free space; outboxes limit instead
        )
        socket.rcvhwm = READ_AHEAD_MESSAGES
        socket.maxmsgsize = PART_BYTES
        socket.rcvbuf = READ_AHEAD_LOCAL if is_loopback(host) else READ_AHEAD
        socket.handshake_ivl = HANDSHAKE_MS
        socket.heartbeat_ivl = HEARTBEAT_MS
        socket.heartbeat_timeout = SILENCE_MS
        return socket

    def close(self, socket: zmq.Socket[bytes]) -> None:
        """Closes a socket. Closes the context with the last one."""
        if socket.closed:
            return
        with self._lock:
            socket.close()
            self._open -= 1
            if self._open == 0 and self._context is not None:
                self._context.term()
                self._context = None


def put(message: Message, outbox: Outbox[Message]) -> None:
    """Queues a message."""
    outbox.put(message, message.priority, 0 if message.payload is None else message.payload.nbytes)


def transmit(
    outbox: Outbox[Message], router: zmq.Socket[bytes], route: bytes, seal: Seal, *, force: bool = False
) -> None:
    """Sends messages that fit the window on one of a ROUTER's connections."""
    while (message := outbox.take(force=force)) is not None:
        router.send(route, NOW_AND_MORE)
        pass_to_zmq(message, outbox, router, seal)


def pass_to_zmq(message: Message, outbox: Outbox[Message], socket: zmq.Socket[bytes], seal: Seal) -> None:
    """Passes a message from an outbox to ZeroMQ."""
    header, payload = seal.seal(message)
    if payload is None:
        socket.send(header, NOW)
        return
    socket.send(header, NOW_AND_MORE)
    for start in range(0, max(payload.nbytes, 1), PART_BYTES):
        end = start + PART_BYTES
        # A view that only ZeroMQ holds: when ZeroMQ releases it, the kernel has the bytes.
        # pyzmq copies parts below 64 KiB and releases them at once.
        last = end >= payload.nbytes
        socket.send(outbox.watch(payload[start:end]), NOW if last else NOW_AND_MORE, copy=False)


def receive(socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """Yields at most MAX_BATCH received messages; of a longer one only the first MAX_PARTS + 1 parts."""
    for _ in range(MAX_BATCH):
        if not has_message(socket):  # cheaper than an exception from recv
            return
        frames = [frame := socket.recv(NOW, copy=False)]
        while frame.more:
            frame = socket.recv(NOW, copy=False)
            if len(frames) <= MAX_PARTS:
                frames.append(frame)
        yield frames


def message_of(frames: list[zmq.Frame], seal: Seal) -> Message:
    """Returns header and payload; a payload of one part in the memory that it arrived in.

    Raises:
        DamagedHeader: The seal does not trust the message, or there are too many parts.
    """
    if len(frames) >= MAX_PARTS:
        raise DamagedHeader(f"a message has {len(frames)} parts or more; the maximum is {MAX_PARTS - 1}")
    return seal.open(frames[0].bytes, [frame.buffer for frame in frames[1:]])


def joined(parts: list[memoryview]) -> memoryview | None:
    """Returns the payload of these parts; that of one part is the part itself."""
    if len(parts) < 2:
        return parts[0] if parts else None
    payload, filled = unset_memory(sum(part.nbytes for part in parts)), 0
    for part in parts:
        copy(part, payload[filled : filled + part.nbytes])
        filled += part.nbytes
    return payload


def descriptor_of(socket: zmq.Socket[bytes]) -> int:
    """Returns the socket's edge-triggered descriptor."""
    return int(socket.getsockopt(zmq.FD))


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message can be received."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)


_CLOSED = 7  # TCP_CLOSE
_INFO = struct.Struct("<B127xQ64xQQ")
"""The start of Linux's tcp_info: state, bytes_received, and (since 4.19) bytes_sent and bytes_retrans."""


class Counts(NamedTuple):
    """What the kernel knows of a connection.

    Attributes:
        closed: Whether it has ended.
        received: Bytes that the peer sent.
        sent: Bytes that the peer was sent, each counted once. ZeroMQ greets a peer at once, so this is 0 only
            if the peer grants no room, or if the kernel does not count.
    """

    closed: bool
    received: int
    sent: int


def counts(line: socket.socket) -> Counts:
    """Returns the counts of a connection; none on an old kernel."""
    try:
        info = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        state, received, sent, again = _INFO.unpack(info)
    except (OSError, struct.error):
        return Counts(closed=False, received=0, sent=0)
    return Counts(state == _CLOSED, received, sent - again)

"""ZeroMQ's sockets of one process, and messages in and out of them.

ZeroMQ's own queues are first in, first out, and a ROUTER drops what they have
no room for. So messages wait in an `Outbox` for each line, by reference, and
ZeroMQ gets a few slices at a time: as it lets go of a payload, the next goes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import zmq

from hubring.ps.config.address import is_loopback
from hubring.ps.transport.base import MAX_PAYLOAD, Message
from hubring.ps.transport.outbox import Outbox
from hubring.ps.transport.zmq.malloc_settings import keep_freed_memory

SCHEME = "tcp://"

FOR_REPLIES = b"<"
"""Ends the name of a line for replies; the rest is that of the line of their requests."""

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
two threads, not one, bring two workers from 1.20 to 1.14, and reusing frames' pages
(`malloc_settings.py`) one worker from 1.23 to 1.09. A thread moves 2 GB/s each way. Larger TCP
buffers change nothing.
"""

LAST_WORDS_MS = 1_000
"""How long a closing listener tries to bring its last replies out."""

# As plain numbers: pyzmq's enums take longer to combine than what they ask for takes to do.
NOW, _NOW_AND_MORE, _READABLE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.POLLIN)


class Sockets:
    """Makes them; ZeroMQ's I/O threads run only while one is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._open = 0

    def open(self, kind: int, host: str) -> zmq.Socket[bytes]:
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

    def close(self, socket: zmq.Socket[bytes]) -> None:
        """Closes it, and with the last one the context."""
        if socket.closed:
            return
        with self._lock:
            socket.close()
            self._open -= 1
            if self._open == 0 and self._context is not None:
                self._context.term()
                self._context = None


def put(message: Message, outbox: Outbox[Message]) -> None:
    """Lets a message wait for its turn on a line."""
    outbox.put(message, message.priority, 0 if message.payload is None else message.payload.nbytes)


def transmit(
    outbox: Outbox[Message], router: zmq.Socket[bytes], line: bytes, *, at_any_rate: bool = False
) -> None:
    """Hands a ROUTER what there is room for on one of its lines."""
    while (message := outbox.take(at_any_rate=at_any_rate)) is not None:
        router.send(line, _NOW_AND_MORE)
        hand_over(message, outbox, router)


def hand_over(message: Message, outbox: Outbox[Message], socket: zmq.Socket[bytes]) -> None:
    """Gives ZeroMQ what an outbox has given."""
    if message.payload is None:
        socket.send(message.header, NOW)
    else:
        socket.send(message.header, _NOW_AND_MORE)
        # A view that only ZeroMQ holds: when it lets go, the kernel has the bytes.
        # pyzmq copies payloads of less than 64 KiB: those have left at once.
        socket.send(outbox.watch(memoryview(message.payload)), NOW, copy=False)


def receive(socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """The messages that are here, AT_ONCE at most."""
    for _ in range(AT_ONCE):
        if not has_message(socket):  # cheaper than to try and be told
            return
        frames = [socket.recv(NOW, copy=False)]
        while frames[-1].more:
            frames.append(socket.recv(NOW, copy=False))
        yield frames


def message_of(frames: list[zmq.Frame]) -> Message:
    """Header and payload in the memory that they arrived in."""
    return Message(frames[0].bytes, frames[1].buffer if len(frames) > 1 else None)


def descriptor_of(socket: zmq.Socket[bytes]) -> int:
    """What is ready once when a socket has news, whatever it is."""
    return int(socket.getsockopt(zmq.FD))


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether there is something to receive."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)

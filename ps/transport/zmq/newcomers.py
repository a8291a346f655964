"""The connections to a ROUTER that have not completed ZeroMQ's handshake: few, and short.

ZeroMQ limits neither the number of connections nor what one sends before its handshake ends, except by the
size of a part. So a thread learns of each new connection from the ROUTER's monitor, and keeps a descriptor of
its own for it, because ZeroMQ may close its own at any time. The kernel counts the bytes of a connection.

Law: who has completed the handshake has been sent READY, which is longer than all that others are sent.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct
import threading
import time
from collections import Counter
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from hubring.ps.core import descriptors
from hubring.ps.core.rejections import Rejections
from hubring.ps.transport.zmq.malloc_settings import release_freed_memory
from hubring.ps.transport.zmq.socket import HANDSHAKE_MS, has_message

log = logging.getLogger(__name__)

MOST = 256
"""Connections whose handshake is not complete. Beyond it, the address with most of them loses its oldest."""

LOOK_SECONDS = 0.002
"""How often the thread looks at them. A stranger of the same host sends about 4 MB meanwhile."""

HANDSHAKE_RECEIVED = 16 << 10
"""Bytes that a client may send before its handshake ends. PLAIN takes 190, and CURVE 567."""

HANDSHAKE_SENT = 96
"""Bytes above which READY was sent (https://rfc.zeromq.org/spec/37).

Others are sent the greeting (64) and ERROR (12) or PLAIN's WELCOME (10), those with READY at least 106.
CURVE's WELCOME makes it more, but it is only sent to clients that know the shard's key.
"""

RELEASE_SECONDS = 5.0
"""How long after a stranger that sent too much the memory that it filled goes back to the kernel."""

_BATCH = 256
"""Events between two looks."""

_CLOSED = 7  # TCP_CLOSE
_INFO = struct.Struct("<B127xQ64xQQ")
"""The start of Linux's tcp_info: state, bytes_received, and (since 4.19) bytes_sent and bytes_retrans."""

_HANDSHAKE_SECONDS = HANDSHAKE_MS / 1000 + 1.0
"""After this time, ZeroMQ has closed a connection whose handshake is not complete."""

_LIBC = ctypes.CDLL(None)
_UNSPECIFIED = (ctypes.c_ubyte * 16)()  # a sockaddr of AF_UNSPEC

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


class _Newcomer(NamedTuple):
    """A connection.

    Attributes:
        line: Our descriptor of it.
        address: The peer's IP address.
        since: When it was accepted, in monotonic seconds.
    """

    line: socket.socket
    address: str
    since: float


class Newcomers:
    """Watches a ROUTER's new connections in a thread until `close`.

    Args:
        router: Listens; it has no other monitor.
        port: The port that it listens on.
        rejections: Counts the connections that are closed here.
    """

    def __init__(self, router: zmq.Socket[bytes], port: int, rejections: Rejections) -> None:
        self._router = router
        self._port = port
        self._rejections = rejections
        self._held: dict[int, _Newcomer] = {}
        """By ZeroMQ's descriptor, oldest first."""
        self._counts: Counter[str] = Counter()
        """Their number by address."""
        self._members: set[int] = set()
        """ZeroMQ's descriptors of the other connections."""
        self._release_at = 0.0
        self._monitor = router.get_monitor_socket(_EVENTS)
        self._thread = threading.Thread(target=self._run, name="zmq newcomers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops watching. Only the ROUTER's thread may call it."""
        self._router.disable_monitor()
        self._thread.join()
        self._monitor.close(0)

    def _run(self) -> None:
        # ZeroMQ's threads wait for this one once 1,000 events are unread, so it must not end before close().
        while self._take_events():
            for number in list(self._held):
                self._look(number)
            if self._release_at and time.monotonic() > self._release_at:
                self._release_at = 0.0
                release_freed_memory()
        for newcomer in self._held.values():
            newcomer.line.close()

    def _take_events(self) -> bool:
        """Waits for an event or for the next look. Returns whether to go on."""
        self._monitor.poll(int(1000 * LOOK_SECONDS) if self._held or self._release_at else None)
        for _ in range(_BATCH):
            if not has_message(self._monitor):
                break
            message = parse_monitor_message(self._monitor.recv_multipart())
            if message["event"] == zmq.EVENT_MONITOR_STOPPED:
                return False
            number = message["value"]
            self._forget(number)
            self._members.discard(number)
            if message["event"] == zmq.EVENT_ACCEPTED:
                self._add(number)
        return True

    def _add(self, number: int) -> None:
        line = self._own(number)
        if line is None:
            return
        try:
            # Otherwise the connection has ended, and the number is another file's.
            if line.getsockname()[1] == self._port:
                newcomer = _Newcomer(line, line.getpeername()[0], time.monotonic())
                self._held[number] = newcomer
                self._counts[newcomer.address] += 1
                self._limit()
                return
        except OSError:  # its peer has gone
            pass
        line.close()

    def _own(self, number: int) -> socket.socket | None:
        """Returns another descriptor of a connection, or None if the connection has ended."""
        own = -1
        try:
            own = os.dup(number)
            return socket.socket(fileno=own)
        except OSError as error:
            if own >= 0:
                os.close(own)
            if not (self._held and descriptors.out_of_them(error)):
                return None
        self._rejections.add("descriptors", log, "closed a ZeroMQ connection: no file descriptor is free")
        self._shut(self._oldest()[0])
        return self._own(number)

    def _look(self, number: int) -> None:
        """Ends the watch of a connection that has completed its handshake or ended, or sends too much."""
        newcomer = self._held[number]
        try:
            told = newcomer.line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
            state, received, sent, again = _INFO.unpack(told)
        except (OSError, struct.error):  # an old kernel, which does not count
            state = received = sent = again = 0
        if sent - again > HANDSHAKE_SENT or time.monotonic() - newcomer.since > _HANDSHAKE_SECONDS:
            self._members.add(number)
            self._forget(number)
        elif state == _CLOSED:
            self._forget(number)
        elif received > HANDSHAKE_RECEIVED:
            text = f"closed a ZeroMQ connection of {newcomer.address}: it sent {received} bytes before the"
            self._rejections.add("handshake", log, f"{text} end of its handshake")
            self._release_at = self._release_at or time.monotonic() + RELEASE_SECONDS
            self._shut(number)

    def _limit(self) -> None:
        """Closes connections that are too many."""
        room = min(descriptors.share(MOST, 16), descriptors.limit() // 2 - len(self._members))
        while self._held and len(self._held) > room:
            number, address = self._oldest()
            self._look(number)
            if number in self._held:
                text = f"closed a ZeroMQ connection of {address}, which had"
                text = f"{text} {self._counts[address]} in their handshake"
                self._rejections.add("connections", log, text)
                self._shut(number)

    def _oldest(self) -> tuple[int, str]:
        """Returns the oldest connection of the address that has most: a member's handshake is short."""
        [(address, _)] = self._counts.most_common(1)
        return next(number for number, each in self._held.items() if each.address == address), address

    def _shut(self, number: int) -> None:
        """Closes a connection: ZeroMQ sees its end and frees its memory."""
        _reset(self._held[number].line)
        self._forget(number)

    def _forget(self, number: int) -> None:
        newcomer = self._held.pop(number, None)
        if newcomer is not None:
            newcomer.line.close()
            self._counts[newcomer.address] -= 1
            if not self._counts[newcomer.address]:
                del self._counts[newcomer.address]


def _reset(line: socket.socket) -> None:
    """Ends a connection, and frees what the kernel has received, which ZeroMQ would read after `shutdown`."""
    _LIBC.connect(line.fileno(), _UNSPECIFIED, len(_UNSPECIFIED))  # connect(2) of AF_UNSPEC

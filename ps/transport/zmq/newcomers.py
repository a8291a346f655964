"""The connections to a ROUTER that have not completed ZeroMQ's handshake: few, and short.

ZeroMQ limits neither the number of connections nor what one sends before its handshake ends, except by the
size of a part. So a thread learns of each new connection from the ROUTER's monitor, and keeps a descriptor of
its own for it (`duplicate`). The kernel wakes the thread for each packet, and counts the bytes.

Law: a peer that completed the handshake has been sent READY, its last command. All others have been sent at
most what the mechanism sends before it.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections import Counter
from typing import Literal, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from hubring.ps.core import bounds
from hubring.ps.core.bounds import Rejections
from hubring.ps.transport.host import duplicate, network_of, release_freed_memory, reset
from hubring.ps.transport.zmq.socket import (
    HANDSHAKE_MS,
    HANDSHAKE_RECEIVED,
    counts,
    descriptor_of,
    has_message,
)

log = logging.getLogger(__name__)

MOST = 256
"""Connections whose handshake is not complete. Beyond it, one of them is closed."""

BEFORE_READY = 64 + 12
"""Bytes that are sent at most before READY: the greeting, and ERROR or WELCOME (rfc.zeromq.org/spec/37)."""

RELEASE_SECONDS = 5.0
"""How long after a stranger that sent too much the memory that it filled goes back to the kernel."""

_AGAIN_SECONDS = 0.05
"""After this time the thread tries again to close connections, as ZeroMQ may not have greeted any of them."""

_BATCH = 256
"""Events of the monitor between two looks at the connections."""

_HANDSHAKE_SECONDS = HANDSHAKE_MS / 1000 + 1.0
"""After this time, ZeroMQ has closed a connection whose handshake is not complete."""

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED

_NEWS = select.EPOLLIN | select.EPOLLOUT | select.EPOLLET
"""A packet is an edge of EPOLLIN. With EPOLLOUT it is reported even if ZeroMQ has read it meanwhile."""


class _Newcomer(NamedTuple):
    """A connection.

    Attributes:
        line: Our descriptor of it.
        network: The part of the peer's IP address that it cannot choose.
        since: When it was accepted, in monotonic seconds.
    """

    line: socket.socket
    network: str
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
        self._numbers: dict[int, int] = {}
        """ZeroMQ's descriptors by ours."""
        self._counts: Counter[str] = Counter()
        """Their number by network."""
        self._members: set[int] = set()
        """ZeroMQ's descriptors of the other connections."""
        self._kernel_counts = False
        """Whether any connection has shown that the kernel counts what is sent."""
        self._release_at = 0.0
        self._stopped = False
        self._monitor = router.get_monitor_socket(_EVENTS)
        self._epoll = select.epoll()
        self._epoll.register(descriptor_of(self._monitor), select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="zmq newcomers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops watching. Only the ROUTER's thread may call it."""
        self._router.disable_monitor()
        self._thread.join()
        self._epoll.close()
        self._monitor.close(0)

    def _run(self) -> None:
        # ZeroMQ's threads wait for this one once 1,000 events are unread, so it must not end before close().
        while not self._stopped:
            try:
                self._turn()
            except Exception:
                log.exception("an error while watching new ZeroMQ connections; the watch goes on")
        for newcomer in self._held.values():
            newcomer.line.close()

    def _turn(self) -> None:
        """Waits for news, and reads them."""
        for own, _ in self._epoll.poll(self._patience()):
            if own in self._numbers:
                self._look(self._numbers[own])
        for _ in range(_BATCH):
            if self._stopped or not has_message(self._monitor):
                break
            self._take(self._monitor.recv_multipart())
        self._make_room()
        now = time.monotonic()
        while self._held and (oldest := next(iter(self._held))) and now > self._end_of(oldest):
            self._members.add(oldest)
            self._forget(oldest)
        if self._release_at and now > self._release_at:
            self._release_at = 0.0
            release_freed_memory()

    def _patience(self) -> float | None:
        """Returns for how many seconds there may be nothing to do without news; None: for ever."""
        if has_message(self._monitor):  # a descriptor of ZeroMQ does not report what was left
            return 0.0
        ends = [self._end_of(oldest) for oldest in list(self._held)[:1]]
        ends += [self._release_at] if self._release_at else []
        ends += [time.monotonic() + _AGAIN_SECONDS] if self._is_full() else []
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _end_of(self, number: int) -> float:
        return self._held[number].since + _HANDSHAKE_SECONDS

    def _take(self, event: list[bytes]) -> None:
        """Reads an event of the monitor."""
        message = parse_monitor_message(event)
        if message["event"] == zmq.EVENT_MONITOR_STOPPED:
            self._stopped = True
            return
        number = message["value"]
        self._forget(number)
        self._members.discard(number)
        if message["event"] == zmq.EVENT_ACCEPTED:
            self._add(number)

    def _add(self, number: int) -> None:
        line = self._own(number)
        if line is None:
            return
        try:
            if line.family not in (socket.AF_INET, socket.AF_INET6) or line.getsockname()[1] != self._port:
                raise OSError("the connection has ended, and the number is another file's")
            network = network_of(line.getpeername()[0])
            self._epoll.register(line, _NEWS)  # which also reports what came before
        except OSError:  # its peer has gone
            line.close()
            return
        self._held[number] = _Newcomer(line, network, time.monotonic())
        self._numbers[line.fileno()] = number
        self._counts[network] += 1
        self._make_room()

    def _make_room(self) -> None:
        while self._is_full() and self._close_one("connections", "too many are open"):
            pass

    def _is_full(self) -> bool:
        room = min(bounds.descriptor_share(MOST, 16), bounds.descriptor_limit() // 2 - len(self._members))
        return len(self._held) > max(0, room)

    def _own(self, number: int) -> socket.socket | None:
        """Returns another descriptor of a connection; None if the connection has ended, or none is free."""
        while True:
            try:
                return duplicate(number)
            except OSError as error:
                if not bounds.out_of_descriptors(error):
                    return None
            if not self._close_one("descriptors", "no file descriptor is free"):
                return None

    def _look(self, number: int) -> None:
        """Ends the watch of a connection that has completed its handshake or ended, or sends too much."""
        newcomer = self._held[number]
        seen = counts(newcomer.line)
        self._kernel_counts |= seen.sent > 0
        if seen.sent > BEFORE_READY:
            self._members.add(number)
            self._forget(number)
        elif seen.closed:
            self._forget(number)
        elif seen.received > HANDSHAKE_RECEIVED:
            text = (
                f"closed a ZeroMQ connection of {newcomer.network}: it sent {seen.received} bytes before the"
            )
            self._rejections.add("handshake", log, f"{text} end of its handshake")
            self._release_at = self._release_at or time.monotonic() + RELEASE_SECONDS
            self._shut(number)

    def _close_one(self, kind: Literal["connections", "descriptors"], why: str) -> bool:
        """Makes room for another connection. Returns whether it could."""
        if not self._held:
            return False
        number = self._surplus()
        network = self._held[number].network
        self._look(number)
        if number in self._held:
            if not self._tells_members():
                return False
            text = f"closed a ZeroMQ connection of {network}, which had {self._counts[network]} in their"
            self._rejections.add(kind, log, f"{text} handshake: {why}")
            self._shut(number)
        return True

    def _tells_members(self) -> bool:
        """Whether the kernel's counts tell members from strangers, as they do if any of them is not 0."""
        lines = (each.line for each in self._held.values())
        self._kernel_counts = self._kernel_counts or any(counts(line).sent for line in lines)
        return self._kernel_counts

    def _surplus(self) -> int:
        """Returns the oldest connection, since a member's handshake is short.

        It is one of the network that has most of them, if that network has more than a fair share.
        """
        [(network, count)] = self._counts.most_common(1)
        held = iter(self._held)
        if count <= MOST // 8:
            return next(held)
        return next(number for number in held if self._held[number].network == network)

    def _shut(self, number: int) -> None:
        """Closes a connection: ZeroMQ sees its end and frees its memory."""
        reset(self._held[number].line)
        self._forget(number)

    def _forget(self, number: int) -> None:
        newcomer = self._held.pop(number, None)
        if newcomer is not None:
            self._epoll.unregister(newcomer.line)  # closing it does not, while ZeroMQ has another descriptor
            del self._numbers[newcomer.line.fileno()]
            newcomer.line.close()
            self._counts[newcomer.network] -= 1
            if not self._counts[newcomer.network]:
                del self._counts[newcomer.network]

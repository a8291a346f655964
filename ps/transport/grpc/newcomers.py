"""The connections to a gRPC server with TLS on which no call was let in yet: few, if strangers open many.

gRPC bounds its connections, and how long a handshake takes, but strangers who connect again and again would
keep members out. It does not report new connections. So a thread counts this process's descriptors, and
looks at the connections behind them every second, and whenever there are many more than before.

Law: a connection with a call is a member's, since gRPC reads no call of a client that did not prove itself.
So is one that is older than gRPC's limit of a handshake. Of the others, the oldest one is closed of the
network that has most: a member's handshake takes milliseconds.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, NamedTuple
from urllib.parse import unquote

import grpc

from hubring.ps.core import bounds
from hubring.ps.core.bounds import Rejections
from hubring.ps.transport.host import duplicate, network_of, release_freed_memory, reset

log = logging.getLogger(__name__)

MOST = 96
"""Connections without a call, if there are descriptors enough. Beyond it, the oldest ones are closed."""

MOST_EXPECTED = 256
"""Members that may connect at once beside them, as those of a job do that starts."""

HANDSHAKE_MS = 5_000
"""How long gRPC waits for the end of a handshake."""

COUNT_SECONDS, LOOK_SECONDS = 0.05, 1.0

RELEASE_SECONDS = 0.25
"""How often the memory of closed connections goes back to the kernel, which takes 2 to 5 ms, in a flood.

Strangers who connect again and again would otherwise leave some 10 MB a second in arenas of the C library.
"""


_Peer = tuple[str, int]
"""The other end of a connection: its IP address, and its port."""


class _File(NamedTuple):
    """What a descriptor of this process is.

    Attributes:
        inode: Distinguishes it from a later file with the same number.
        peer: The other end of a connection to the port; None for another file.
        since: When it was seen first, in monotonic seconds.
    """

    inode: int
    peer: _Peer | None
    since: float


class GrpcNewcomers:
    """Watches the connections to one port in a thread, from `begin` until `close`.

    Args:
        rejections: Counts the connections that are closed here.
        expected: How many members connect.
    """

    def __init__(self, rejections: Rejections, expected: int = 0) -> None:
        self._rejections = rejections
        self._members: set[_Peer] = set()
        self._files: dict[int, _File] = {}
        self._usual = 0
        """Descriptors of this process without those of newcomers."""
        self._most = bounds.descriptor_share(MOST, 16)
        self._expected = min(expected, bounds.descriptor_share(MOST_EXPECTED, 8))
        self._ended = threading.Event()

    def begin(self, port: int) -> None:
        """Begins to watch the connections to a port of this process."""
        threading.Thread(target=self._run, args=(port,), name="grpc newcomers", daemon=True).start()

    def close(self) -> None:
        """Stops watching."""
        self._ended.set()

    def admit(self, peer: str) -> None:
        """Records that a call was let in.

        Args:
            peer: As gRPC names it: `ipv4:ADDRESS:PORT` or `ipv6:[ADDRESS]:PORT`.
        """
        host, _, port = unquote(peer).partition(":")[2].rpartition(":")
        if port.isdigit():  # otherwise it came by a unix socket
            self._members.add((_plain(host.strip("[]")), int(port)))

    def _run(self, port: int) -> None:
        due = release = calm = 0.0
        while not self._ended.wait(COUNT_SECONDS):
            now = time.monotonic()
            with suppress(OSError):  # no descriptor is free
                if now > due or len(os.listdir("/proc/self/fd")) > self._usual + self._most:
                    due = now + LOOK_SECONDS
                    # By then gRPC has ended the handshakes that were left.
                    calm = now + HANDSHAKE_MS / 1000 + LOOK_SECONDS if self.look(port, now) else calm
            if release < now < calm:
                release = now + RELEASE_SECONDS
                release_freed_memory()

    def look(self, port: int, now: float) -> bool:
        """Closes connections to the port if too many are new. The thread calls it.

        Args:
            port: The server's.
            now: Monotonic seconds.

        Returns:
            Whether it closed any.

        Raises:
            OSError: No descriptor is free.
        """
        members = set(self._members)
        descriptors = map(int, os.listdir("/proc/self/fd"))
        self._files = {number: self._file(number, port, now) for number in descriptors}
        found = {file.peer for file in self._files.values() if file.peer is not None}
        self._members -= members - found
        new: defaultdict[str, deque[int]] = defaultdict(deque)
        """Descriptors by network, the oldest ones first."""
        for number, (_, peer, since) in sorted(self._files.items(), key=lambda each: each[1].since):
            if peer and peer not in self._members and since > now - HANDSHAKE_MS / 1000 - LOOK_SECONDS:
                new[network_of(peer[0])].append(number)
        count = sum(map(len, new.values()))
        self._usual = len(self._files) - count
        surplus = count - self._most - max(0, self._expected - len(found) + count)
        for _ in range(surplus):
            network, numbers = max(new.items(), key=lambda each: len(each[1]))
            text = f"closed a gRPC connection of {network}, which had {len(numbers)} in their handshake"
            self._rejections.add("connections", log, text)
            number = numbers.popleft()
            file = self._files[number]
            self._files[number] = file._replace(peer=None)
            with suppress(OSError), duplicate(number) as line:
                if _peer_of(line, port) == file.peer:  # otherwise the number is another file's by now
                    reset(line)
        return surplus > 0

    def _file(self, number: int, port: int, now: float) -> _File:
        known, inode, peer = self._files.get(number), 0, None
        try:
            inode = os.fstat(number).st_ino
            if known is not None and known.inode == inode:
                return known
            with duplicate(number) as line:
                peer = _peer_of(line, port)
        except OSError as error:  # no socket, one that listens, or it has ended
            if bounds.out_of_descriptors(error):
                raise
        return _File(inode, peer, now)


def _peer_of(line: socket.socket, port: int) -> _Peer | None:
    """Returns the other end of a connection to the port; None if it is not one. Raises OSError."""
    if line.family not in (socket.AF_INET, socket.AF_INET6) or line.getsockname()[1] != port:
        return None
    host, at, *_ = line.getpeername()
    return _plain(host), at


def _plain(host: str) -> str:
    return host.partition("%")[0].removeprefix("::ffff:")


class AdmittedCalls(grpc.ServerInterceptor):
    """Reports each call to a server with threads to `newcomers`. A guard comes before it."""

    def __init__(self, newcomers: GrpcNewcomers) -> None:
        self._newcomers = newcomers

    def intercept_service(self, continuation: Callable[[Any], Any], call: Any) -> Any:
        handler = continuation(call)
        if handler is None:
            return None
        kinds = "unary_unary", "unary_stream", "stream_stream"
        kind = next(kind for kind in kinds if getattr(handler, kind))
        behavior = getattr(handler, kind)

        @wraps(behavior)
        def admitted(requests: Any, context: grpc.ServicerContext) -> Any:
            self._newcomers.admit(context.peer())
            return behavior(requests, context)

        return handler._replace(**{kind: admitted})

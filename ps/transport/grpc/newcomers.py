"""The connections to a gRPC server with TLS on which no call was let in yet: few, if strangers open many.

gRPC bounds its connections, and how long a handshake takes, but strangers who connect again and again would
keep members out. It tells nobody of a new connection. So a thread counts this process's descriptors, and
looks at the connections behind them only if there are many more than before.

Law: a connection with a call is a member's, since gRPC reads no call of a client that did not prove itself.
So is one that is older than gRPC's limit of a handshake. Of the others, the oldest one is closed of the
network that has most: a member's handshake takes milliseconds.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections import Counter
from contextlib import ExitStack
from typing import NamedTuple
from urllib.parse import unquote

from hubring.ps.core import bounds
from hubring.ps.core.bounds import Rejections
from hubring.ps.transport.host import duplicate, network_of, release_freed_memory, reset

log = logging.getLogger(__name__)

MOST = 96
"""Connections without a call, if there are descriptors enough. Beyond it, the oldest ones are closed."""

HANDSHAKE_MS = 5_000
"""How long gRPC waits for the end of a handshake."""

LOOK_SECONDS = 0.05

RELEASE_SECONDS = 5.0
"""How long after the last look at many connections the memory that they filled goes back to the kernel."""


class _Peer(NamedTuple):
    """The other end of a connection: its IP address, and its port."""

    host: str
    port: int


class Newcomers:
    """Watches the connections to one port in a thread, from `begin` until `close`.

    Args:
        rejections: Counts the connections that are closed here.
    """

    def __init__(self, rejections: Rejections) -> None:
        self._rejections = rejections
        self._members: set[_Peer] = set()
        self._since: dict[_Peer, float] = {}
        """When a connection was seen first, in monotonic seconds."""
        self._usual = 0
        """Descriptors of this process without those of newcomers."""
        self._most = bounds.descriptor_share(MOST, 16)
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
            self._members.add(_Peer(_plain(host.strip("[]")), int(port)))

    def _run(self, port: int) -> None:
        looked = math.inf
        while not self._ended.wait(LOOK_SECONDS):
            if len(os.listdir("/proc/self/fd")) > self._usual + self._most:
                looked = time.monotonic()
                with ExitStack() as lines:
                    self._look(port, lines)
            elif time.monotonic() > looked + RELEASE_SECONDS:
                looked = math.inf
                release_freed_memory()

    def _look(self, port: int, lines: ExitStack) -> None:
        now, members = time.monotonic(), set(self._members)
        numbers = list(map(int, os.listdir("/proc/self/fd")))
        found: dict[_Peer, socket.socket] = {}
        for number in numbers:
            try:
                line = lines.enter_context(duplicate(number))
                if line.family in (socket.AF_INET, socket.AF_INET6) and line.getsockname()[1] == port:
                    host, at, *_ = line.getpeername()
                    found[_Peer(_plain(host), at)] = line
            except OSError:  # no socket, one that listens, or it has ended meanwhile
                continue
        self._members -= members - found.keys()
        self._since = {peer: self._since.get(peer, now) for peer in found}
        oldest = now - HANDSHAKE_MS / 1000 - 1.0
        new = sorted(
            (peer for peer in found if peer not in self._members and self._since[peer] > oldest),
            key=self._since.__getitem__,
        )
        self._usual = len(numbers) - len(new)
        counts = Counter(network_of(peer.host) for peer in new)
        while len(new) > self._most:
            [(network, count)] = counts.most_common(1)
            peer = next(each for each in new if network_of(each.host) == network)
            new.remove(peer)
            counts[network] -= 1
            reset(found[peer])
            text = f"closed a gRPC connection of {network}, which had {count} in their handshake"
            self._rejections.add("connections", log, text)


def _plain(host: str) -> str:
    return host.partition("%")[0].removeprefix("::ffff:")

"""Shared memory: the transport between processes of one user on one Linux host.

A Unix socket carries fixed-size descriptors and headers. A payload never passes through it. A worker's
payload is in a segment of the worker's, which the shard maps once and reads in place. A reply that is
`stable` and in a segment of the shard's is mapped in the worker's window the first time; later replies move
no data. Any other reply is written directly to `into` if that is in a segment, and otherwise gets a segment
of its own. The socket's name is in the abstract namespace, so socket and segments leave nothing on the host.
"""

from __future__ import annotations

import threading

from hubring.ps.core import huge_pages
from hubring.ps.core.rejections import Rejections
from hubring.ps.security.door import OPEN, Door
from hubring.ps.transport.shm.connection import ShmConnection
from hubring.ps.transport.shm.listener import ShmListener
from hubring.ps.transport.shm.segment import Arena
from hubring.ps.transport.shm.window import Window, Windows


class ShmTransport:
    """The segments of one process, and the connections that use them.

    Args:
        guarded: Whether peers may only read this process's segments. True for a shard, where no replies land.
        rejections: Counts what a listener refuses.
    """

    name = "shm"

    def __init__(self, *, guarded: bool = False, rejections: Rejections | None = None) -> None:
        self._rejections = rejections or Rejections()
        self._serves = guarded
        self._arena = Arena(guarded=guarded)
        self._windows = Windows(self._arena)

    def listen(self, host: str) -> ShmListener:
        return ShmListener(self._arena, self._rejections)

    def dial(self, address: str, timeout: float, door: Door = OPEN) -> ShmConnection:
        # The socket checks that both ends have one user.
        return ShmConnection(self._arena, self._windows, address, timeout)

    def allocate(self, nbytes: int) -> memoryview:
        memory = self._arena.allocate(nbytes)
        if self._serves:  # a shard must answer workers meanwhile; the memory can be used at once
            threading.Thread(
                target=huge_pages.populate, args=(memory,), name="huge pages", daemon=True
            ).start()
        else:
            huge_pages.populate(memory)
        return memory

    def window(self, nbytes: int) -> Window:
        return self._windows.allocate(nbytes, populate=False)

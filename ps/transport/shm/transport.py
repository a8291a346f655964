"""Shared memory: the wire between processes of one user on one Linux host.

A Unix socket carries descriptors of fixed form and the header behind them; a
payload never goes through it. A worker's payload lies in a segment of its own,
which the shard maps once and reads in place. A reply that is `stable` and lies in
the shard's own segment is shown in the worker's window: its pages are mapped there
the first time, and nothing at all is moved from then on. Any other is written
straight into the worker's memory where `into` lies in a segment, and otherwise
comes in a segment of its own. The socket's name is in the abstract namespace, so
neither it nor the segments leave anything on the host.
"""

from __future__ import annotations

import threading

from hubring.ps.core import huge_pages
from hubring.ps.transport.shm.connection import ShmConnection
from hubring.ps.transport.shm.listener import ShmListener
from hubring.ps.transport.shm.segment import Arena
from hubring.ps.transport.shm.window import Windows


class ShmTransport:
    """The segments of one process, and the lines on which it passes them on.

    Args:
        guarded: Peers may read this process's segments but not write to them: a shard's, where
            replies never land.
    """

    name = "shm"

    def __init__(self, *, guarded: bool = False) -> None:
        self._serves = guarded
        self._arena = Arena(guarded=guarded)
        self._windows = Windows(self._arena)

    def listen(self, host: str) -> ShmListener:
        return ShmListener(self._arena)

    def dial(self, address: str, timeout: float) -> ShmConnection:
        return ShmConnection(self._arena, self._windows, address, timeout)

    def allocate(self, nbytes: int) -> memoryview:
        memory = self._arena.allocate(nbytes)
        if self._serves:  # a shard has others to answer meanwhile, and they may write there already
            threading.Thread(
                target=huge_pages.populate, args=(memory,), name="huge pages", daemon=True
            ).start()
        else:
            huge_pages.populate(memory)
        return memory

    def window(self, nbytes: int) -> memoryview:
        return self._arena.allocate(nbytes, window=True)

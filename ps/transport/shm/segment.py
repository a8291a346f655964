"""Memory that two processes share: memfds, which have no name and leave nothing behind.

A segment's size is sealed, so no process can pull it from under another. It
lives as long as somebody maps it or holds it open: its maker as long as a view of
it is left, its reader until it hears that it may forget it, or the line ends.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import threading
import weakref
from typing import NamedTuple

from hubring.ps.core import huge_pages
from hubring.ps.transport.memory import address
from hubring.ps.transport.shm.memory_map import rounded, show, write

SEGMENT_BYTES = 256 << 20
"""Address space of one segment; its pages come into being when they are first touched."""

_SEAL_FUTURE_WRITE = 0x10
"""Of Linux 5.1: mappings that exist stay writable, new ones are not."""


class Region(NamedTuple):
    """A run of bytes in a segment of the sender's; length 0 is no place at all."""

    segment: int = 0
    offset: int = 0
    length: int = 0


class Segment(NamedTuple):
    """A segment of this process's own, ready to be passed on.

    Attributes:
        windows: Where its windows end, if replies may be shown in them; None in any other segment.
    """

    number: int
    descriptor: int
    start: int
    nbytes: int
    windows: set[int] | None


class Arena:
    """Hands out memory from segments, and knows which memory lies in which. Safe from any thread.

    All of it begins at a page, since only whole pages can be shown to others.

    Args:
        guarded: Processes to which a segment is passed on may read it, but not write to it; and each
            allocation has a segment of its own, so that its memory is free as soon as it goes.
    """

    def __init__(self, *, guarded: bool = False) -> None:
        self._guarded = guarded
        self._seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | (_SEAL_FUTURE_WRITE if guarded else 0)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._segments: dict[int, Segment] = {}
        self._rest = {False: memoryview(b""), True: memoryview(b"")}
        """What is left of the newest segment, and of the newest one of windows."""

    def allocate(self, nbytes: int, *, window: bool = False) -> memoryview:
        """Zeroed memory; its segment goes with the last view of it."""
        with self._lock:
            memory = self._take(rounded(max(nbytes, 1)), window)[:nbytes]
        region = self.find(memory)
        if window and region is not None:
            ends = self._segments[region.segment].windows
            assert ends is not None
            ends.add(region.offset + region.length)
        return memory

    def _take(self, room: int, window: bool) -> memoryview:
        if self._guarded or room > SEGMENT_BYTES // 2:
            return self._new_segment(room, window)
        rest = self._rest[window]
        if room >= huge_pages.HUGE_BYTES:
            rest = rest[-address(rest) % huge_pages.HUGE_BYTES :]
        if room > rest.nbytes:
            rest = self._new_segment(SEGMENT_BYTES, window)
        self._rest[window] = rest[room:]
        return rest[:room]

    def find(self, memory: memoryview) -> Region | None:
        """Where `memory` lies, if it is ours."""
        start = address(memory)
        for segment in list(self._segments.values()):
            offset = start - segment.start
            if 0 <= offset <= segment.nbytes - memory.nbytes:
                return Region(segment.number, offset, memory.nbytes)
        return None

    def segment(self, number: int) -> Segment | None:
        """The segment of this number, if it is still alive."""
        return self._segments.get(number)

    def _new_segment(self, nbytes: int, window: bool) -> memoryview:
        descriptor = os.memfd_create("hubring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, nbytes)
        memory = _map(descriptor, nbytes)
        seal(descriptor, self._seals)
        number = next(self._numbers)
        self._segments[number] = Segment(
            number, descriptor, address(memory), nbytes, set() if window else None
        )
        # Not a method: it would keep the arena, and by `_rest` the mapping, from ever dying.
        weakref.finalize(memory.obj, _drop, self._segments, number).atexit = False
        return memory


def _drop(segments: dict[int, Segment], number: int) -> None:
    os.close(segments.pop(number).descriptor)


def enclose(payload: memoryview) -> int:
    """A descriptor of a new sealed segment that holds a copy of `payload`; the caller closes it."""
    descriptor = os.memfd_create("hubring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        write(descriptor, payload, 0)
        seal(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def seal(descriptor: int, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) -> None:
    """Fixes a segment's size, or what else `seals` say, for good."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)


def attach(descriptor: int) -> memoryview:
    """Maps a segment that another process passed on, and closes the descriptor, which it needs no more.

    Raises:
        ValueError: It could shrink under our feet, or is no segment at all.
    """
    try:
        return _map(descriptor, sealed_size(descriptor))
    finally:
        os.close(descriptor)


def _map(descriptor: int, nbytes: int) -> memoryview:
    """A file's memory, where its huge pages are mapped as such; it lives as long as a view of it does."""
    memory = huge_pages.room(nbytes)
    show(address(memory), rounded(nbytes), descriptor, 0, private=False)
    return memory


def sealed_size(descriptor: int) -> int:
    """Bytes of a segment that another process passed on, which can never become fewer.

    Raises:
        ValueError: They could, or it is no segment at all.
    """
    nbytes = os.fstat(descriptor).st_size
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError as error:
        raise ValueError(f"a descriptor that is no memfd: {error}") from error
    if not sealed or nbytes == 0:
        raise ValueError(f"a segment of {nbytes} bytes whose size is not sealed")
    return nbytes

"""Memory that two processes share: memfds, which have no name and leave nothing behind.

A segment's size is sealed, so no process can pull it from under another. It
lives as long as somebody maps it: descriptors are closed as soon as they were
passed on or are needed no more.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import threading
import weakref
from typing import NamedTuple

from ps.transport.memory import ALIGNMENT, address

SEGMENT_BYTES = 256 << 20
"""Address space of one segment; its pages come into being when they are first touched."""


class Place(NamedTuple):
    """A run of bytes in a segment of the sender's; length 0 is no place at all."""

    segment: int = 0
    offset: int = 0
    length: int = 0


class Segment(NamedTuple):
    """A segment of this process's own, ready to be passed on."""

    number: int
    descriptor: int
    start: int
    nbytes: int


class Arena:
    """Hands out memory from segments, and knows which memory lies in which. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._segments: dict[int, Segment] = {}
        self._rest = memoryview(b"")

    def allocate(self, nbytes: int) -> memoryview:
        """Zeroed memory, aligned to 64 bytes; its segment goes with the last view of it."""
        room = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            if room > SEGMENT_BYTES // 2:
                return self._new_segment(room)[:nbytes]
            if room > self._rest.nbytes:
                self._rest = self._new_segment(SEGMENT_BYTES)
            piece, self._rest = self._rest[:nbytes], self._rest[room:]
            return piece

    def find(self, memory: memoryview) -> Place | None:
        """Where `memory` lies, if it is ours."""
        start = address(memory)
        for segment in list(self._segments.values()):
            offset = start - segment.start
            if 0 <= offset <= segment.nbytes - memory.nbytes:
                return Place(segment.number, offset, memory.nbytes)
        return None

    def segment(self, number: int) -> Segment | None:
        """The segment of this number, if it is still alive."""
        return self._segments.get(number)

    def _new_segment(self, nbytes: int) -> memoryview:
        descriptor = os.memfd_create("hubring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, nbytes)
        seal(descriptor)
        mapping = mmap.mmap(descriptor, nbytes)
        number = next(self._numbers)
        self._segments[number] = Segment(number, descriptor, address(memoryview(mapping)), nbytes)
        # Not a method: it would keep the arena, and by `_rest` the mapping, from ever dying.
        weakref.finalize(mapping, _drop, self._segments, number).atexit = False
        return memoryview(mapping)


def _drop(segments: dict[int, Segment], number: int) -> None:
    os.close(segments.pop(number).descriptor)


def enclose(payload: memoryview) -> int:
    """A descriptor of a new sealed segment that holds a copy of `payload`; the caller closes it."""
    descriptor = os.memfd_create("hubring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        while payload.nbytes:
            payload = payload[os.write(descriptor, payload) :]
        seal(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def seal(descriptor: int) -> None:
    """Fixes a segment's size for good."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def attach(descriptor: int) -> memoryview:
    """Maps a segment that another process passed on; the caller may close the descriptor then.

    Raises:
        ValueError: It could shrink under our feet, or is no segment at all.
    """
    nbytes = os.fstat(descriptor).st_size
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError as error:
        raise ValueError(f"a descriptor that is no memfd: {error}") from error
    if not sealed or nbytes == 0:
        raise ValueError(f"a segment of {nbytes} bytes whose size is not sealed")
    return memoryview(mmap.mmap(descriptor, nbytes))

"""Host memory as bytes: allocation, addresses, copies, mapped files, and segments that two processes share.

Files are mapped with system calls, because Python's mmap maps only where the kernel chooses.

A segment is a memfd, which has no name and leaves nothing behind. Its size is sealed, so no process can
shrink it under another. It lives as long as a process maps it or holds it open. Its owner holds it while a
view of it exists. A reader holds it until the owner releases it, or the connection ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import os
import threading
import weakref
from typing import NamedTuple

import numpy as np

from hubring.ps.core import huge_pages

ALIGNMENT = 64
"""Bytes: a cache line, which is also the widest vector register."""


def plain_memory(nbytes: int) -> memoryview:
    """Returns zeroed, aligned private memory. It lives as long as a view of it."""
    room = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -address(room.data) % ALIGNMENT
    return room[start : start + nbytes].data


def unset_memory(nbytes: int) -> memoryview:
    """Returns private memory with any content, for a caller that fills it."""
    return np.empty(nbytes, np.uint8).data


def address(memory: memoryview) -> int:
    """Returns the address of a contiguous view's first byte."""
    if not memory.nbytes:
        return 0
    if memory.readonly:
        start: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        return start
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def copy(source: memoryview, target: memoryview) -> None:
    """Copies `source` to the front of `target`, without the GIL."""
    np.copyto(np.frombuffer(target, np.uint8, source.nbytes), np.frombuffer(source, np.uint8))


def land(source: memoryview | None, target: memoryview | None) -> memoryview | None:
    """Copies `source` to the front of `target` and returns that part, or None if it does not fit."""
    if source is None or target is None or source.nbytes > target.nbytes:
        return None
    if source.nbytes:
        copy(source, target)
    return target[: source.nbytes]


PAGE = mmap.PAGESIZE

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def rounded(nbytes: int) -> int:
    """Returns `nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def memory(start: int, nbytes: int) -> memoryview:
    """Returns this process's memory at `start` as bytes. The caller must keep it alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(start)).cast("B")


def write(descriptor: int, source: memoryview, offset: int) -> None:
    """Writes all of `source` to a file. The kernel takes at most 2 GiB at a time."""
    while source.nbytes:
        written = os.pwrite(descriptor, source, offset)
        source, offset = source[written:], offset + written


def read(descriptor: int, target: memoryview, offset: int) -> None:
    """Fills `target` from a file that is long enough."""
    while target.nbytes:
        count = os.preadv(descriptor, [target], offset)
        target, offset = target[count:], offset + count


def show(start: int, nbytes: int, descriptor: int, offset: int, *, private: bool) -> None:
    """Maps an open file, from `offset` on, into this process's memory at `start`. Whole pages only.

    Raises:
        OSError: The kernel refuses.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    # Few pages of a private mapping are ever written, so no memory is reserved for all of them.
    flags = _MAP_FIXED | (mmap.MAP_PRIVATE | _MAP_NORESERVE if private else mmap.MAP_SHARED)
    if _libc.mmap(start, nbytes, protection, flags, descriptor, offset) != start:
        raise OSError(ctypes.get_errno(), "mmap failed")


def forget(start: int, end: int) -> None:
    """Drops this process's copies of the pages in a private mapping, so that the file's are visible again.

    Raises:
        OSError: The kernel refuses.
    """
    if _libc.madvise(start, end - start, mmap.MADV_DONTNEED) != 0:
        raise OSError(ctypes.get_errno(), "madvise failed")


SEGMENT_BYTES = 256 << 20
"""Address space of one segment. Pages are allocated when they are first used."""

_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1: existing mappings stay writable, new ones are not."""


class Region(NamedTuple):
    """A range of bytes in one of the sender's segments. Length 0 means no memory."""

    segment: int = 0
    offset: int = 0
    length: int = 0


class Segment(NamedTuple):
    """One of this process's segments, ready to be sent.

    Attributes:
        start: Address of its shared mapping.
        seen: Address of its private mapping, in a segment for windows; 0 otherwise.
        windows: The ends of its windows.
    """

    number: int
    descriptor: int
    start: int
    nbytes: int
    seen: int
    windows: set[int]


class Arena:
    """Allocates memory from segments, and finds the segment of given memory. Safe from any thread.

    All allocations start at a page, since only whole pages can be mapped elsewhere.

    Args:
        guarded: Whether other processes may only read the segments. Each allocation then has a segment of
            its own, so that its memory is released with it.

    Attributes:
        segments: The segments that are in use, by number.
    """

    def __init__(self, *, guarded: bool = False) -> None:
        self._guarded = guarded
        self._seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | (_SEAL_FUTURE_WRITE if guarded else 0)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self.segments: dict[int, Segment] = {}
        self._rest = {False: memoryview(b""), True: memoryview(b"")}
        """The unused part of the newest segment, and of the newest segment for windows."""

    def allocate(self, nbytes: int) -> memoryview:
        """Returns zeroed memory. Its segment is released with the last view of it."""
        with self._lock:
            return self._take(rounded(max(nbytes, 1)), window=False)[:nbytes]

    def allocate_window(self, nbytes: int) -> tuple[memoryview, memoryview]:
        """Returns zeroed memory twice: as other processes see it, and a private mapping of it.

        The private mapping has the same bytes, until this process writes to them. The segment is released
        with the last view of either.
        """
        with self._lock:
            shared = self._take(rounded(max(nbytes, 1)), window=True)[:nbytes]
        region = self.find(shared)
        assert region is not None
        segment = self.segments[region.segment]
        segment.windows.add(region.offset + region.length)
        whole = memoryview(shared.obj)  # the mmap, which has both mappings
        start = segment.seen + region.offset - address(whole)
        return shared, whole[start : start + nbytes]

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
        """Returns the region of `memory`, or None if it is not in a segment."""
        start = address(memory)
        # Not a tuple: making one may collect garbage while the dict is read, and `_drop` changes the dict.
        for segment in list(self.segments.values()):
            offset = start - segment.start
            if 0 <= offset <= segment.nbytes - memory.nbytes:
                return Region(segment.number, offset, memory.nbytes)
        return None

    def _new_segment(self, nbytes: int, window: bool) -> memoryview:
        descriptor = os.memfd_create("hubring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, nbytes)
        memory, seen = _map_twice(descriptor, nbytes) if window else (_map(descriptor, nbytes), 0)
        seal(descriptor, self._seals)
        number = next(self._numbers)
        self.segments[number] = Segment(number, descriptor, address(memory), nbytes, seen, set())
        # Not a method: a method would keep the arena alive, and through `_rest` the mapping.
        weakref.finalize(memory.obj, _drop, self.segments, number).atexit = False
        return memory


def _drop(segments: dict[int, Segment], number: int) -> None:
    os.close(segments.pop(number).descriptor)


def enclose(payload: memoryview) -> int:
    """Returns a descriptor of a new sealed segment with a copy of `payload`. The caller closes it."""
    descriptor = os.memfd_create("hubring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        write(descriptor, payload, 0)
        seal(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def seal(descriptor: int, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) -> None:
    """Seals a segment's size, or what `seals` give. Seals cannot be removed."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)


def attach(descriptor: int) -> memoryview:
    """Maps a received segment and closes its descriptor.

    Raises:
        ValueError: The segment could shrink, or the descriptor is not a segment.
    """
    try:
        return _map(descriptor, sealed_size(descriptor))
    finally:
        os.close(descriptor)


def _map(descriptor: int, nbytes: int) -> memoryview:
    """Maps a file so that it can use huge pages. The memory lives as long as a view of it."""
    memory = huge_pages.room(nbytes)
    show(address(memory), rounded(nbytes), descriptor, 0, private=False)
    return memory


def _map_twice(descriptor: int, nbytes: int) -> tuple[memoryview, int]:
    """As `_map`, with the address of a private mapping of the file, which lives as long."""
    distance = -(-nbytes // huge_pages.HUGE_BYTES) * huge_pages.HUGE_BYTES
    memory = huge_pages.room(2 * distance)
    start = address(memory)
    show(start, rounded(nbytes), descriptor, 0, private=False)
    show(start + distance, rounded(nbytes), descriptor, 0, private=True)
    return memory[:nbytes], start + distance


def sealed_size(descriptor: int) -> int:
    """Returns the bytes of a received segment, which cannot shrink.

    Raises:
        ValueError: The segment could shrink, or the descriptor is not a segment.
    """
    nbytes = os.fstat(descriptor).st_size
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError as error:
        raise ValueError(f"the descriptor is not a memfd: {error}") from error
    if not sealed or nbytes == 0:
        raise ValueError(f"the size of a segment of {nbytes} bytes is not sealed")
    return nbytes

"""Host memory as bytes: allocation, addresses, copies, and files mapped at given addresses.

Files are mapped with system calls, because Python's mmap maps only where the kernel chooses.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

ALIGNMENT = 64
"""Bytes: a cache line, which is also the widest vector register."""


def plain_memory(nbytes: int) -> memoryview:
    """Returns zeroed, aligned private memory. It lives as long as a view of it."""
    room = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -address(room.data) % ALIGNMENT
    return room[start : start + nbytes].data


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

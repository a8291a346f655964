"""Pages of this process's memory, and the files that are shown in them.

Plain system calls, which Python's mmap does not offer: it maps only where the
kernel likes.
"""

from __future__ import annotations

import ctypes
import mmap
import os

PAGE = mmap.PAGESIZE

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def rounded(nbytes: int) -> int:
    """Bytes of the pages that `nbytes` need."""
    return -(-nbytes // PAGE) * PAGE


def memory(start: int, nbytes: int) -> memoryview:
    """This process's memory at `start`, as bytes; nobody but the caller keeps it alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(start)).cast("B")


def write(descriptor: int, source: memoryview, offset: int) -> None:
    """Writes all of `source` into a file; the kernel takes at most 2 GiB at a time."""
    while source.nbytes:
        written = os.pwrite(descriptor, source, offset)
        source, offset = source[written:], offset + written


def read(descriptor: int, target: memoryview, offset: int) -> None:
    """Fills `target` from a file that is long enough."""
    while target.nbytes:
        count = os.preadv(descriptor, [target], offset)
        target, offset = target[count:], offset + count


def show(start: int, nbytes: int, descriptor: int, offset: int, *, private: bool) -> None:
    """Lets this process's memory at `start` be that of an open file from `offset` on; whole pages.

    Raises:
        OSError: The kernel refuses.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    # Hardly any page of a private mapping is ever written to, so no memory is set aside for all of them.
    flags = _MAP_FIXED | (mmap.MAP_PRIVATE | _MAP_NORESERVE if private else mmap.MAP_SHARED)
    if _libc.mmap(start, nbytes, protection, flags, descriptor, offset) != start:
        raise OSError(ctypes.get_errno(), "mmap failed")


def forget(start: int, end: int) -> None:
    """Drops what this process has copied there: the file's pages are seen again.

    Raises:
        OSError: The kernel refuses.
    """
    if _libc.madvise(start, end - start, mmap.MADV_DONTNEED) != 0:
        raise OSError(ctypes.get_errno(), "madvise failed")

"""Pages of this process's memory: where files are shown in it, and which it has copied since.

Plain system calls, which Python's mmap does not offer: it maps only where the
kernel likes, and cannot tell a file's page from the private copy that a write made.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

import numpy as np

PAGE = mmap.PAGESIZE

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FILE, _PRESENT, _SWAPPED = 1 << 2, 1 << 3, 1 << 4
_SCAN = 0xC0606610
_ARGUMENT = struct.Struct("<12Q")
_RANGE = struct.Struct("<3Q")
_RANGES = 64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Pages(Protocol):
    """Finds the copies in a private mapping of a file; for one thread."""

    def copied(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """First and last address of each run of pages that are no longer the file's."""


class ScannedPages:
    """Asks the kernel by PAGEMAP_SCAN, which Linux has since 6.7: measured 0.03 ms for 4 MiB."""

    def __init__(self) -> None:
        self._pagemap = _open_pagemap(self)
        self._ranges = ctypes.create_string_buffer(_RANGE.size * _RANGES)
        start = ctypes.addressof(self._ranges) // PAGE * PAGE
        next(self.copied(start, start + PAGE), None)  # raises where the kernel is older

    def copied(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        while start < end:
            argument = bytearray(
                _ARGUMENT.pack(
                    *(_ARGUMENT.size, 0, start, end, 0, ctypes.addressof(self._ranges), _RANGES, 0),
                    *(_FILE, _FILE, _PRESENT | _SWAPPED, _PRESENT),  # not the file's, and there
                )
            )
            found = fcntl.ioctl(self._pagemap, _SCAN, argument)
            for position in range(found):
                first, last, _ = _RANGE.unpack_from(self._ranges, position * _RANGE.size)
                yield first, last
            start = _ARGUMENT.unpack(argument)[4]


class ReadPages:
    """Reads /proc/self/pagemap, on any kernel: measured 0.12 ms for 4 MiB."""

    def __init__(self) -> None:
        self._pagemap = _open_pagemap(self)

    def copied(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        entries = np.frombuffer(
            os.pread(self._pagemap, 8 * (end - start) // PAGE, 8 * start // PAGE), np.uint64
        )
        present, of_file = entries >> np.uint64(62), entries >> np.uint64(61) & np.uint64(1)
        for position in ((present > 0) & (of_file == 0)).nonzero()[0].tolist():
            yield start + position * PAGE, start + (position + 1) * PAGE


def _open_pagemap(owner: Pages) -> int:
    """A descriptor that is closed when its owner goes."""
    descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    weakref.finalize(owner, os.close, descriptor)
    return descriptor


def own_pages() -> Pages | None:
    """The best way to tell copies that this machine has; None where it has none."""
    for kind in (ScannedPages, ReadPages):
        with suppress(OSError):
            return kind()
    return None


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

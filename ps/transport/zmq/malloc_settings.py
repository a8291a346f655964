"""Configures how the C library reuses freed memory."""

from __future__ import annotations

import ctypes
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

LARGEST = 32 << 20
"""Bytes. Larger blocks come from the kernel, smaller ones from the heap."""

TRIM_BYTES = 2 * LARGEST
"""Free bytes at the end of a heap above which they are returned to the kernel."""


@cache
def keep_freed_memory() -> None:
    """Makes this process reuse freed blocks instead of asking the kernel for zeroed pages.

    ZeroMQ allocates and frees messages by the megabyte. With glibc's initial thresholds their pages go
    back to the kernel and are faulted in again: 20,000 faults for 100 MB there and back. That took one
    worker of two shards from 1.09 to 1.23 times the time of plain sockets. glibc itself reaches these
    values once a block of LARGEST was freed. They hold for the whole process. A C library without
    `mallopt` is not changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGEST)
        mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)


def release_freed_memory() -> None:
    """Returns freed memory to the kernel, as far as the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

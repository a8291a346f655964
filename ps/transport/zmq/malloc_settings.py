"""What the C library does with memory that was freed."""

from __future__ import annotations

import ctypes
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

LARGEST = 32 << 20
"""Bytes: blocks up to this size are taken from the heap, larger ones from the kernel."""

KEPT = 2 * LARGEST
"""Bytes that may lie free at the end of a heap before they go back to the kernel."""


@cache
def keep_freed_memory() -> None:
    """Lets this process use freed blocks again, rather than ask the kernel for zeroed pages each time.

    ZeroMQ allocates and frees messages by the megabyte. With glibc's first thresholds
    the pages of each go back to the kernel and are faulted in anew: 20,000 faults
    for 100 MB there and back, which took one worker of two shards from 1.09 to 1.23
    times the time of plain sockets. These values are those at which glibc itself arrives once
    a block of LARGEST was freed. Holds for the whole process; a C library without
    `mallopt` is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGEST)
        mallopt(_M_TRIM_THRESHOLD, KEPT)

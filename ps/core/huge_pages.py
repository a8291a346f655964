"""Host memory in huge pages, where the kernel provides them.

An exchange reads gradients, parameters and optimizer state from end to end. With pages of 4 KiB the
processor must translate an address every 64 cache lines, twice in a virtual machine, and cannot prefetch
across pages. Only whole huge pages of a request are huge, so no memory is wasted.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref

HUGE_BYTES = 2 << 20
"""Size of a huge page where small pages have 4 KiB. Elsewhere the kernel refuses; small pages remain."""

ROOM_BYTES = 32 << 20
"""Address space of a mapping that several small requests share. One mapping each would exceed the
kernel's limit on mappings.
"""

_COLLAPSE = 25
"""MADV_COLLAPSE of Linux 6.1, which Python's mmap lacks."""
_MAP_NORESERVE = 0x4000

_newest: list[tuple[weakref.ref[mmap.mmap], int, int]] = []
"""The newest shared mapping, and the start and end of its free part. A thread pops it while it allocates."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def memory(nbytes: int) -> memoryview:
    """Returns zeroed private memory in huge pages. It lives as long as a view of it.

    Small requests share a mapping, which lives as long as one of them.
    """
    slot = -(-nbytes // HUGE_BYTES) * HUGE_BYTES
    given = (room(slot) if slot > ROOM_BYTES // 4 else _part(slot))[:nbytes]
    start, whole = _inner(given)
    _advise(start, whole, mmap.MADV_HUGEPAGE)
    _advise(start + whole, slot - whole, mmap.MADV_NOHUGEPAGE)  # a huge page here would exceed the request
    return given


def _part(nbytes: int) -> memoryview:
    """Returns part of the newest shared mapping; maps a new one if that is gone or full."""
    try:
        alive, start, end = _newest.pop()
    except IndexError:  # the first call, or another thread holds it
        mapping, start, end = None, 0, 0
    else:
        mapping = alive()
    if mapping is None or nbytes > end - start:
        mapping, start = _reserve(ROOM_BYTES)
        end = start + ROOM_BYTES
    _newest.append((weakref.ref(mapping), start + nbytes, end))
    return memoryview(mapping)[start : start + nbytes]


def room(nbytes: int) -> memoryview:
    """Returns zeroed private memory in small pages, aligned to a huge page."""
    mapping, start = _reserve(nbytes)
    return memoryview(mapping)[start : start + nbytes]


def _reserve(nbytes: int) -> tuple[mmap.mmap, int]:
    """Returns a mapping that fits `nbytes`, and the offset of its first huge page boundary."""
    mapping = mmap.mmap(-1, nbytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return mapping, -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE_BYTES


def populate(memory: memoryview) -> None:
    """Puts shared memory into huge pages for all processes that map it. They can use it meanwhile."""
    start, nbytes = _inner(memory)
    for offset in range(0, nbytes, HUGE_BYTES):
        # The kernel collapses only ranges that have a page.
        _ = ctypes.c_char.from_address(start + offset).value
    _advise(start, nbytes, _COLLAPSE)


def _inner(memory: memoryview) -> tuple[int, int]:
    """Returns the start of the first whole huge page, and the bytes of all whole huge pages."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory)) if memory.nbytes else 0
    first = -(-start // HUGE_BYTES) * HUGE_BYTES
    return first, max(0, (start + memory.nbytes - first) // HUGE_BYTES * HUGE_BYTES)


def _advise(start: int, nbytes: int, advice: int) -> None:
    """Calls madvise. If the kernel refuses, the memory keeps small pages."""
    if nbytes:
        _libc.madvise(start, nbytes, advice)

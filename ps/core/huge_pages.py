"""Host memory in huge pages, where the kernel gives them.

An exchange reads gradients, parameters and the optimizer's state from end to end. In pages of 4 KiB the
processor has to look up where the next one lies after every 64 cache lines, in a virtual machine twice, and
fetches nothing ahead of it. Only whole huge pages of what was asked for are, so that no memory is wasted.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref

HUGE_BYTES = 2 << 20
"""Where small ones have 4 KiB. Elsewhere the kernel says no, and nothing is lost."""

ROOM_BYTES = 32 << 20
"""Address space of a room for several: a mapping for each of them would be more than the kernel allows."""

_COLLAPSE = 25
"""Of Linux 6.1, and missing in Python's mmap."""
_MAP_NORESERVE = 0x4000

_newest: list[tuple[weakref.ref[mmap.mmap], int, int]] = []
"""The newest room, where its free part begins, and where it ends; taken out by who takes of it."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def memory(nbytes: int) -> memoryview:
    """Zeroed memory of this process alone, in huge pages, for as long as a view of it lives.

    What is small lies in a room with others, which lives as long as one of them.
    """
    slot = -(-nbytes // HUGE_BYTES) * HUGE_BYTES
    given = (room(slot) if slot > ROOM_BYTES // 4 else _part(slot))[:nbytes]
    start, whole = _inner(given)
    _advise(start, whole, mmap.MADV_HUGEPAGE)
    _advise(start + whole, slot - whole, mmap.MADV_NOHUGEPAGE)  # a whole one would be more than was asked for
    return given


def _part(nbytes: int) -> memoryview:
    """A part of the newest room, or of another where that is gone or full."""
    try:
        alive, start, end = _newest.pop()
    except IndexError:  # the first, or another thread has it
        mapping, start, end = None, 0, 0
    else:
        mapping = alive()
    if mapping is None or nbytes > end - start:
        mapping, start = _reserve(ROOM_BYTES)
        end = start + ROOM_BYTES
    _newest.append((weakref.ref(mapping), start + nbytes, end))
    return memoryview(mapping)[start : start + nbytes]


def room(nbytes: int) -> memoryview:
    """Zeroed memory of this process alone, in small pages, which begins where a huge one can."""
    mapping, start = _reserve(nbytes)
    return memoryview(mapping)[start : start + nbytes]


def _reserve(nbytes: int) -> tuple[mmap.mmap, int]:
    """A mapping with room for so many bytes, and where in it the first huge page can begin."""
    mapping = mmap.mmap(-1, nbytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return mapping, -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE_BYTES


def populate(memory: memoryview) -> None:
    """Gives shared memory huge pages now, in all who map it; they may read and write meanwhile."""
    start, nbytes = _inner(memory)
    for offset in range(0, nbytes, HUGE_BYTES):
        _ = ctypes.c_char.from_address(start + offset).value  # the kernel collapses what has a page
    _advise(start, nbytes, _COLLAPSE)


def _inner(memory: memoryview) -> tuple[int, int]:
    """Where the first whole huge page begins, and how many bytes all of them have."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory)) if memory.nbytes else 0
    first = -(-start // HUGE_BYTES) * HUGE_BYTES
    return first, max(0, (start + memory.nbytes - first) // HUGE_BYTES * HUGE_BYTES)


def _advise(start: int, nbytes: int, advice: int) -> None:
    """What the kernel refuses stays in small pages."""
    if nbytes:
        _libc.madvise(start, nbytes, advice)

"""Host memory in huge pages, where the kernel gives them.

An exchange reads gradients, parameters and the optimizer's state from end to end. In pages of 4 KiB the
processor has to look up where the next one lies after every 64 cache lines, in a virtual machine twice, and
fetches nothing ahead of it. Nobody's memory becomes more: only whole huge pages of what was asked for are.
"""

from __future__ import annotations

import ctypes
import mmap

HUGE_BYTES = 2 << 20
"""Where small ones have 4 KiB. Elsewhere the kernel says no, and nothing is lost."""

ROOM_BYTES = 64 << 20
"""Address space of one room for several: a mapping a block would be more than the kernel allows."""

_COLLAPSE = 25
"""Of Linux 6.1, and missing in Python's mmap."""
_MAP_NORESERVE = 0x4000

_rests: list[memoryview] = []
"""What is left of rooms: one, and more only where threads took at once, each what it popped for itself."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def memory(nbytes: int) -> memoryview:
    """Zeroed memory of this process alone, in huge pages, for as long as a view of it lives.

    It lies in a room with others', so that little of it, kept for long, keeps theirs too.
    """
    try:
        rest = _rests.pop()
    except IndexError:
        rest = memoryview(b"")
    if nbytes > rest.nbytes:
        rest = room(max(nbytes, ROOM_BYTES))
    given = rest[:nbytes]
    _rests.append(rest[-(-nbytes // HUGE_BYTES) * HUGE_BYTES :])
    _advise(*_inner(given), mmap.MADV_HUGEPAGE)
    return given


def room(nbytes: int) -> memoryview:
    """The same in small pages, alone; begins where a huge one can, and pages come when they are touched."""
    mapping = mmap.mmap(-1, nbytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % HUGE_BYTES
    return memoryview(mapping)[start : start + nbytes]


def populate(memory: memoryview) -> None:
    """Gives new shared memory its pages now, huge ones, whoever maps it and whoever will."""
    start, nbytes = _inner(memory)
    for offset in range(0, nbytes, HUGE_BYTES):
        ctypes.c_char.from_address(start + offset).value = b"\0"  # the kernel collapses what has a page
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

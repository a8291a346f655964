"""Host memory as bytes: allocation, addresses, copies."""

from __future__ import annotations

import ctypes

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

"""Memory in huge pages: where it begins, how much of it is huge, and that nothing else depends on it."""

from __future__ import annotations

import gc
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from hubring.ps.core import huge_pages
from hubring.ps.core.huge_pages import HUGE_BYTES, ROOM_BYTES
from hubring.ps.optim.sums import zeros, zeros_like
from hubring.ps.transport.mapping import Arena, address, attach

WHOLE = 3 * HUGE_BYTES
LARGE = WHOLE + 5 * mmap.PAGESIZE


def huge_at(start: int) -> int:
    """Bytes in huge pages of the mapping in which `start` lies, as the kernel counts them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            first, end = (int(place, 16) for place in name.split("-"))
            inside = first <= start < end
        elif inside and name in ("AnonHugePages:", "ShmemPmdMapped:") and values[0] != "0":
            return int(values[0]) << 10
    return 0


KERNEL = Path("/sys/kernel/mm/transparent_hugepage")


def gives_private() -> bool:
    """Whether this kernel gives a process huge pages that asks for them, by what it says."""
    return (KERNEL / "enabled").exists() and "[never]" not in (KERNEL / "enabled").read_text()


def gives_shared() -> bool:
    """The same, of memory that it shares, whatever the setting for those who do not ask."""
    shared = KERNEL / "shmem_enabled"
    since = tuple(int(number) for number in os.uname().release.split(".")[:2])
    return since >= (6, 1) and shared.exists() and "[deny]" not in shared.read_text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool])
def test_zeros_are_zeros_of_any_size_and_dtype(dtype: torch.dtype) -> None:
    for numel in (0, 1, HUGE_BYTES // dtype.itemsize, LARGE // dtype.itemsize):
        assert torch.equal(zeros(numel, dtype), torch.zeros(numel, dtype=dtype))
    like = zeros_like(torch.ones(1024, 3, 1024, dtype=dtype))
    assert (like.shape, like.dtype, like.any().item()) == ((1024, 3, 1024), dtype, False)


def test_large_ones_begin_where_a_huge_page_can() -> None:
    assert zeros(LARGE, torch.uint8).data_ptr() % HUGE_BYTES == 0
    arena = Arena()
    odd = arena.allocate(1)
    first, second = arena.allocate(LARGE), arena.allocate(LARGE)
    assert (address(first) % HUGE_BYTES, address(second) % HUGE_BYTES) == (0, 0)
    assert address(odd) < address(first) < address(second), "in one segment"
    segment = arena.segments.get(1)
    assert segment is not None
    assert address(attach(os.dup(segment.descriptor))) % HUGE_BYTES == 0


@pytest.mark.parametrize("nbytes", [HUGE_BYTES, ROOM_BYTES])
def test_memory_lives_as_long_as_a_view_of_it(nbytes: int) -> None:
    whole = huge_pages.memory(nbytes)
    mapping = weakref.ref(cast(mmap.mmap, whole.obj))
    part = torch.frombuffer(whole, dtype=torch.uint8)[nbytes // 2 :]
    del whole
    gc.collect()
    assert mapping() is not None
    assert part.fill_(1).all()
    del part
    gc.collect()
    assert mapping() is None


def test_threads_that_ask_at_once_get_memory_of_their_own() -> None:
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda number: zeros(HUGE_BYTES, torch.uint8).fill_(number), range(100)))
    assert all(part.eq(number).all() for number, part in enumerate(parts))


@pytest.mark.skipif(not gives_private(), reason="this kernel gives no huge pages")
def test_private_memory_lies_in_huge_pages() -> None:
    memory = zeros(LARGE, torch.uint8)
    before = huge_at(memory.data_ptr())
    memory.fill_(1)
    assert huge_at(memory.data_ptr()) - before == WHOLE


@pytest.mark.skipif(not gives_shared(), reason="this kernel gives no huge pages to share")
def test_shared_memory_lies_in_huge_pages_in_all_who_map_it() -> None:
    arena = Arena()
    memory = arena.allocate(LARGE)
    segment = arena.segments.get(1)
    assert segment is not None
    assert huge_at(address(memory)) == 0, "until somebody wants them"
    memory[5] = 9
    huge_pages.populate(memory)
    assert memory[5] == 9
    assert huge_at(address(memory)) == WHOLE, "the rest is its neighbours' too"
    other = attach(os.dup(segment.descriptor))
    other[WHOLE - 1] = 7
    other[0] = 8
    assert (memory[WHOLE - 1], memory[0]) == (7, 8)
    assert huge_at(address(other)) == 2 * HUGE_BYTES, "of those that it touched"


def test_where_the_kernel_refuses_all_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(start: int, nbytes: int, advice: int) -> int:
        asked.append(nbytes)
        return -1

    monkeypatch.setattr(huge_pages, "_libc", SimpleNamespace(madvise=refuse))
    assert not zeros(LARGE, torch.uint8).any()
    memory = Arena().allocate(LARGE)
    huge_pages.populate(memory)
    memory[-1] = 1
    assert bytes(memory) == bytes(LARGE - 1) + b"\1"
    assert asked == [WHOLE, HUGE_BYTES, WHOLE]
    assert huge_at(address(memory)) == 0

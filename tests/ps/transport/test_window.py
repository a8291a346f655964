"""Windows, and how copies are told from what is shown."""

from __future__ import annotations

import errno
import mmap
import os
import platform
from typing import NoReturn

import pytest

from hubring.ps.transport.memory import address
from hubring.ps.transport.shm.copies import Copies, ReadCopies, ScannedCopies, WatchedCopies
from hubring.ps.transport.shm.memory_map import PAGE, forget, rounded, show
from hubring.ps.transport.shm.segment import SEGMENT_BYTES, Arena, Region
from hubring.ps.transport.shm.window import Windows

PAGES = 300


WAYS: list[type[Copies]] = [ReadCopies, ScannedCopies, WatchedCopies]
SINCE = (6, 7)
"""The kernel that has all of them."""


def make(kind: type[Copies]) -> Copies:
    """One; skips where this machine cannot have it, and only there."""
    try:
        return kind()
    except OSError as error:
        release = tuple(int(part) for part in platform.release().split(".")[:2])
        if kind is not ReadCopies and release < SINCE:
            pytest.skip(f"Linux {platform.release()} is older than 6.7")
        if kind is WatchedCopies and error.errno in (errno.EPERM, errno.ENOSYS):
            pytest.skip(f"userfaultfd is refused here: {error}")
        raise


def a_file(pages: int) -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, b"x" * pages * PAGE)
    return descriptor


def find(copies: Copies, start: int) -> list[int]:
    """The pages that are copies, by their numbers; they are dropped, as whoever finds them must."""
    found: list[int] = []
    for first, end in copies.find(start, start + PAGES * PAGE):
        forget(first, end)
        found += range((first - start) // PAGE, (end - start) // PAGE)
    return found


@pytest.mark.parametrize("read", [True, False], ids=["read before", "not read"])
@pytest.mark.parametrize("kind", WAYS)
def test_pages_written_to_are_found_and_no_others(kind: type[Copies], read: bool) -> None:
    descriptor = a_file(PAGES)
    memory = mmap.mmap(-1, PAGES * PAGE)
    start = address(memoryview(memory))
    copies = make(kind)
    show(start, PAGES * PAGE, descriptor, 0, private=True)
    copies.watch(start, start + PAGES * PAGE)
    os.close(descriptor)
    assert find(copies, start) == []
    if read:
        assert memory[:] == b"x" * PAGES * PAGE
    written = [0, 7, 8, *range(10, PAGES, 2)]  # more runs than one call to the kernel tells
    for page in written:
        memory[page * PAGE + 5] = 0
    assert find(copies, start) == written
    assert memory[:] == b"x" * PAGES * PAGE
    memory[7 * PAGE] = memory[11 * PAGE] = 0  # one that was dropped, one that never was
    assert find(copies, start) == [7, 11]


@pytest.mark.parametrize("kind", WAYS)
def test_a_child_that_writes_is_no_matter_of_its_parents(kind: type[Copies]) -> None:
    """As a DataLoader's processes are, which have their parent's memory."""
    descriptor = a_file(PAGES)
    memory = mmap.mmap(-1, PAGES * PAGE, flags=mmap.MAP_PRIVATE)
    start = address(memoryview(memory))
    copies = make(kind)
    show(start, PAGES * PAGE, descriptor, 0, private=True)
    copies.watch(start, start + PAGES * PAGE)
    os.close(descriptor)
    memory[0] = 0
    child = os.fork()
    if child == 0:
        memory[PAGE] = 0
        os._exit(memory[PAGE])
    assert os.waitpid(child, 0) == (child, 0)
    memory[2 * PAGE] = 0
    assert find(copies, start) == [0, 2]


def shown() -> tuple[Arena, memoryview, Region, Windows, int]:
    arena = Arena()
    window = arena.allocate(2 * PAGE, window=True)
    region = arena.find(window)
    assert region is not None
    return arena, window, region, Windows(arena), a_file(4)


def test_a_window_follows_the_file_and_drops_what_was_written_when_it_is_shown_again() -> None:
    _, window, region, windows, descriptor = shown()
    windows.show(region, "shard", descriptor, Region(1, PAGE, 2 * PAGE))
    os.pwrite(descriptor, b"new", PAGE)
    assert bytes(window[:3]) == b"new"
    window[0:3] = b"own"
    assert os.pread(descriptor, 3, PAGE) == b"new"
    windows.show(region, "shard", descriptor, Region(1, PAGE, 2 * PAGE))
    assert bytes(window[:3]) == b"new"
    windows.show(region, "shard", descriptor, Region(1, 0, 2 * PAGE))
    assert bytes(window[:3]) == b"xxx"
    assert windows.fit(region), "the kernel refused"
    os.close(descriptor)


@pytest.mark.parametrize("refused", ["watch", "find"])
def test_where_the_kernel_refuses_answers_are_copied(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    arena, window, region, windows, descriptor = shown()

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(type(windows._copies), refused, refuse)
    for _ in range(2):
        windows.show(region, "shard", descriptor, Region(1, PAGE, 2 * PAGE))
        assert bytes(window[:3]) == b"xxx"
    assert not windows.fit(region)
    segment = arena.segment(region.segment)
    assert segment is not None
    os.pwrite(segment.descriptor, b"copied", region.offset)
    windows.own(region)
    assert bytes(window[:6]) == b"copied"
    window[:3] = b"our"
    assert os.pread(segment.descriptor, 3, region.offset) == b"our"
    os.close(descriptor)


def test_what_a_connection_showed_is_kept_and_changes_no_more() -> None:
    _, window, region, windows, descriptor = shown()
    windows.show(region, "shard", descriptor, Region(1, 0, 2 * PAGE))
    windows.keep("another")
    os.pwrite(descriptor, b"new", 0)
    assert bytes(window[:3]) == b"new"
    windows.keep("shard")
    os.pwrite(descriptor, b"old", 0)
    assert bytes(window[:4]) == b"newx"
    os.close(descriptor)


def test_a_window_that_is_owned_again_shows_what_others_write_into_it() -> None:
    arena, window, region, windows, descriptor = shown()
    windows.show(region, "shard", descriptor, Region(1, 0, 2 * PAGE))
    segment = arena.segment(region.segment)
    assert segment is not None
    os.pwrite(segment.descriptor, b"landed", region.offset)
    assert bytes(window[:6]) == b"xxxxxx"
    windows.own(region)
    assert bytes(window[:6]) == b"landed"
    os.close(descriptor)


def test_what_is_kept_is_there_before_the_window_turns_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, _, region, windows, descriptor = shown()
    windows.show(region, "shard", descriptor, Region(1, 0, 2 * PAGE))
    os.close(descriptor)
    segment = arena.segment(region.segment)
    assert segment is not None
    seen = []
    monkeypatch.setattr(
        windows, "own", lambda window: seen.append(os.pread(segment.descriptor, PAGE, window.offset))
    )
    windows.keep("shard")
    assert seen == [b"x" * PAGE]


def test_only_whole_pages_are_windows_or_what_a_window_ends_with() -> None:
    arena = Arena()
    windows = Windows(arena)
    memory = arena.find(arena.allocate(3 * PAGE + 10, window=True))
    assert memory is not None
    number, offset, _ = memory
    assert windows.fit(memory)
    assert windows.fit(Region(number, offset + PAGE, 2 * PAGE))
    assert windows.fit(Region(number, offset + 2 * PAGE, PAGE + 10))
    assert not windows.fit(Region(number, offset, PAGE + 10))
    assert not windows.fit(Region(number, offset + 64, PAGE))
    sent = arena.find(arena.allocate(PAGE))
    assert sent is not None
    assert not windows.fit(sent)
    descriptor = a_file(1)
    windows.show(Region(number, offset + PAGE, PAGE), "shard", descriptor, Region(1, 0, PAGE))
    os.close(descriptor)
    assert windows.overlap(memory)
    assert not windows.overlap(Region(number, offset, PAGE))
    assert not windows.overlap(sent)


def test_memory_that_is_gone_is_left_alone() -> None:
    arena, window, region, windows, descriptor = shown()
    windows.show(region, "shard", descriptor, Region(1, 0, 2 * PAGE))
    window.release()
    del window
    arena.allocate(SEGMENT_BYTES // 2, window=True)  # the arena lets go of the first segment's rest
    windows.keep("shard")
    windows.own(region)
    os.close(descriptor)


def test_sizes_are_rounded_to_pages() -> None:
    assert [rounded(size) for size in (0, 1, PAGE, PAGE + 1)] == [0, PAGE, PAGE, 2 * PAGE]

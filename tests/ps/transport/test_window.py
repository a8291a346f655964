"""Windows, and how copies are told from what is shown."""

from __future__ import annotations

import errno
import mmap
import os
import platform
from typing import NoReturn

import pytest

from hubring.ps.transport.memory import address
from hubring.ps.transport.shm import memory_map
from hubring.ps.transport.shm.copies import Copies, ReadCopies, ScannedCopies, WatchedCopies
from hubring.ps.transport.shm.memory_map import PAGE, forget, rounded, show
from hubring.ps.transport.shm.segment import SEGMENT_BYTES, Arena, Region
from hubring.ps.transport.shm.window import Window, Windows
from hubring.ps.transport.zmq.transport import ZmqTransport

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


def shown() -> tuple[Arena, Window, Region, Windows, int]:
    arena = Arena()
    windows = Windows(arena)
    window = windows.allocate(2 * PAGE, populate=False)
    region = arena.find(window.landing)
    assert region is not None
    return arena, window, region, windows, a_file(4)


HALVES = [PAGE, 2 * PAGE]


def test_a_window_follows_the_file_and_hides_it_behind_what_was_written_until_that_is_forgotten() -> None:
    _, window, region, windows, descriptor = shown()
    windows.show(region, "shard", descriptor, Region(1, PAGE, 2 * PAGE))
    os.pwrite(descriptor, b"new", PAGE)
    assert bytes(window.seen[:3]) == b"new"
    window.seen[0:3] = b"own"
    assert os.pread(descriptor, 3, PAGE) == b"new"
    windows.show(region, "shard", descriptor, Region(1, PAGE, 2 * PAGE))
    os.pwrite(descriptor, b"now", PAGE)
    assert bytes(window.seen[:3]) == b"own"
    assert bytes(window.landing[:3]) == b"now"
    windows.show(region, "shard", descriptor, Region(1, 0, 2 * PAGE))
    assert bytes(window.seen[:4]) == b"ownx"
    assert window.written(HALVES) == [0]
    window.forget()
    assert bytes(window.seen[:4]) == b"xxxx"
    assert window.written(HALVES) == []
    assert windows.fit(region), "the kernel refused"
    os.close(descriptor)


@pytest.mark.parametrize("refused", ["watch", "find"])
def test_where_the_kernel_refuses_to_tell_all_is_compared(
    monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    arena, window, region, windows, descriptor = shown()

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(type(windows._copies), refused, refuse)
    for _ in range(2):
        windows.show(region, "shard", descriptor, Region(1, PAGE, 2 * PAGE))
        assert window.written(HALVES) == []
        assert bytes(window.seen[:3]) == b"xxx"
        window.seen[PAGE] = 0
        assert window.written(HALVES) == [1]
        window.forget()
        assert window.written(HALVES) == []
    assert not windows.fit(region)
    segment = arena.segment(region.segment)
    assert segment is not None
    os.pwrite(segment.descriptor, b"copied", region.offset)
    windows.own(region)
    assert bytes(window.landing[:6]) == b"copied"
    window.forget()
    assert bytes(window.seen[:6]) == b"copied"
    os.close(descriptor)


def test_where_the_kernel_refuses_to_map_answers_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    _, window, region, windows, descriptor = shown()

    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOMEM, "no memory")

    window.seen[PAGE] = 1
    monkeypatch.setattr(memory_map, "show", refuse)
    windows.show(region, "shard", descriptor, Region(1, PAGE, 2 * PAGE))
    assert not windows.fit(region)
    assert not windows.overlap(region)
    assert bytes(window.landing) == b"x" * 2 * PAGE
    assert bytes(window.seen[: PAGE + 2]) == b"x" * PAGE + b"\1\0"
    assert window.written(HALVES) == [1]
    os.close(descriptor)


def test_pages_that_the_kernel_does_not_drop_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pages that a script has locked in memory."""
    _, window, _, _, descriptor = shown()
    os.close(descriptor)

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EINVAL, "locked")

    monkeypatch.setattr(memory_map, "forget", refuse)
    for step in range(1, 4):
        window.seen[0] = 7
        assert window.written(HALVES) == [0]
        window.landing[0] = window.landing[PAGE] = step
        window.forget()
        assert (window.seen[0], window.seen[PAGE]) == (step, step)
        assert window.written(HALVES) == []


def test_without_shared_memory_both_sides_are_compared_and_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that forbids memfd_create; a network transport works there."""

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    window = ZmqTransport().window(2 * PAGE)
    for step in range(1, 4):
        assert window.written(HALVES) == []
        window.seen[PAGE] = 7
        window.landing[0] = window.landing[PAGE] = step
        assert window.written(HALVES) == [0, 1]
        window.forget()
        assert (window.seen[0], window.seen[PAGE]) == (step, step)


def test_what_a_connection_showed_is_kept_and_changes_no_more() -> None:
    _, window, region, windows, descriptor = shown()
    windows.show(region, "shard", descriptor, Region(1, 0, 2 * PAGE))
    windows.keep("another")
    os.pwrite(descriptor, b"new", 0)
    window.seen[PAGE] = 0
    assert bytes(window.seen[:3]) == b"new"
    windows.keep("shard")
    os.pwrite(descriptor, b"old", 0)
    assert bytes(window.seen[:4]) == bytes(window.landing[:4]) == b"newx"
    assert (window.seen[PAGE], window.written(HALVES)) == (0, [1])
    window.forget()
    assert window.seen[PAGE] == ord("x")
    os.close(descriptor)


def test_a_window_that_is_owned_again_shows_what_others_write_into_it() -> None:
    arena, window, region, windows, descriptor = shown()
    windows.show(region, "shard", descriptor, Region(1, 0, 2 * PAGE))
    segment = arena.segment(region.segment)
    assert segment is not None
    os.pwrite(segment.descriptor, b"landed", region.offset)
    assert bytes(window.seen[:6]) == b"xxxxxx"
    windows.own(region)
    assert bytes(window.seen[:6]) == bytes(window.landing[:6]) == b"landed"
    window.landing[:4] = b"more"
    assert os.pread(segment.descriptor, 6, region.offset) == b"moreed"
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
    window = windows.allocate(3 * PAGE + 10, populate=False)
    memory = arena.find(window.landing)
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


def test_what_is_seen_is_not_found_in_the_segment_so_it_is_sent_as_a_copy() -> None:
    arena, window, _, _, descriptor = shown()
    os.close(descriptor)
    assert arena.find(window.seen) is None
    assert window.seen.nbytes == window.landing.nbytes


def test_what_is_seen_outlives_the_landing_memory() -> None:
    arena = Arena()
    window = Windows(arena).allocate(SEGMENT_BYTES // 2 + 1, populate=False)  # with a segment of its own
    region = arena.find(window.landing)
    assert region is not None
    window.landing[:3] = b"new"
    seen = window.seen
    del window
    assert arena.segment(region.segment) is not None
    assert bytes(seen[:3]) == b"new"
    seen.release()
    assert arena.segment(region.segment) is None


def test_memory_that_is_gone_is_left_alone() -> None:
    arena, window, region, windows, descriptor = shown()
    windows.show(region, "shard", descriptor, Region(1, 0, 2 * PAGE))
    window.landing.release()
    window.seen.release()
    del window
    arena.allocate_window(SEGMENT_BYTES // 2)  # the arena lets go of the first segment's rest
    windows.keep("shard")
    windows.own(region)
    os.close(descriptor)


def test_sizes_are_rounded_to_pages() -> None:
    assert [rounded(size) for size in (0, 1, PAGE, PAGE + 1)] == [0, PAGE, PAGE, 2 * PAGE]

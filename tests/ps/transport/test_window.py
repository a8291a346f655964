"""Windows, and how copies are told from what is shown."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import platform
from unittest.mock import Mock

import pytest

from hubring.ps.transport import mapping
from hubring.ps.transport.mapping import PAGE, SEGMENT_BYTES, Arena, Region, address, forget, show
from hubring.ps.transport.window import Window, Windows
from hubring.ps.transport.written_pages import Copies, ReadCopies, ScannedCopies, WatchedCopies
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


@pytest.mark.parametrize("refused", ["watch", "find"])
def test_where_the_kernel_refuses_to_tell_all_is_compared(
    monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    arena, window, region, windows, descriptor = shown()
    monkeypatch.setattr(type(windows._copies), refused, Mock(side_effect=OSError(errno.ENOMEM, "no memory")))
    for _ in range(2):
        windows.show(region, "shard", descriptor, Region(1, PAGE, 2 * PAGE))
        assert window.written(HALVES) == []
        assert bytes(window.seen[:3]) == b"xxx"
        window.seen[PAGE] = 0
        assert window.written(HALVES) == [1]
        window.forget()
        assert window.written(HALVES) == []
    assert not windows.fit(region)
    segment = arena.segments.get(region.segment)
    assert segment is not None
    os.pwrite(segment.descriptor, b"copied", region.offset)
    windows.own(region)
    assert bytes(window.landing[:6]) == b"copied"
    window.forget()
    assert bytes(window.seen[:6]) == b"copied"
    os.close(descriptor)


def test_pages_that_the_kernel_does_not_drop_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pages that a script has locked in memory."""
    _, window, _, _, descriptor = shown()
    os.close(descriptor)
    monkeypatch.setattr(mapping, "forget", Mock(side_effect=OSError(errno.EINVAL, "locked")))
    for step in range(1, 4):
        window.seen[0] = 7
        assert window.written(HALVES) == [0]
        window.landing[0] = window.landing[PAGE] = step
        window.forget()
        assert (window.seen[0], window.seen[PAGE]) == (step, step)
        assert window.written(HALVES) == []


def test_without_shared_memory_both_sides_are_compared_and_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that forbids memfd_create; a network transport works there."""
    monkeypatch.setattr(os, "memfd_create", Mock(side_effect=OSError(errno.EPERM, "not permitted")))
    window = ZmqTransport().window(2 * PAGE)
    for step in range(1, 4):
        assert window.written(HALVES) == []
        window.seen[PAGE] = 7
        window.landing[0] = window.landing[PAGE] = step
        assert window.written(HALVES) == [0, 1]
        window.forget()
        assert (window.seen[0], window.seen[PAGE]) == (step, step)


def test_a_window_that_is_owned_again_shows_what_others_write_into_it() -> None:
    arena, window, region, windows, descriptor = shown()
    windows.show(region, "shard", descriptor, Region(1, 0, 2 * PAGE))
    segment = arena.segments.get(region.segment)
    assert segment is not None
    os.pwrite(segment.descriptor, b"landed", region.offset)
    assert bytes(window.seen[:6]) == b"xxxxxx"
    windows.own(region)
    assert bytes(window.seen[:6]) == bytes(window.landing[:6]) == b"landed"
    window.landing[:4] = b"more"
    assert os.pread(segment.descriptor, 6, region.offset) == b"moreed"
    os.close(descriptor)


def test_a_windows_visible_memory_outlives_the_landing_memory() -> None:
    arena = Arena()
    window = Windows(arena).allocate(SEGMENT_BYTES // 2 + 1, populate=False)  # with a segment of its own
    region = arena.find(window.landing)
    assert region is not None
    window.landing[:3] = b"new"
    seen = window.seen
    del window
    assert arena.segments.get(region.segment) is not None
    assert bytes(seen[:3]) == b"new"
    seen.release()
    assert arena.segments.get(region.segment) is None


def test_memory_is_found_while_a_garbage_collection_releases_other_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever the collection comes: after each number of allocations, up to more than there are."""
    arena = Arena(guarded=True)
    kept = [arena.allocate(1) for _ in range(30)]  # as many as no tuple is reused for
    start = address(kept[-1])
    monkeypatch.setattr(mapping, "address", lambda memory: start)  # its own allocations would come first
    before = gc.get_threshold()
    gc.freeze()  # else each collection looks through all that other tests have left
    try:
        for allocations in range(12):
            gc.disable()
            gc.collect()
            garbage: list[object] = [arena.allocate(1)]
            garbage.append(garbage)
            del garbage
            gc.set_threshold(gc.get_count()[0] + allocations, *before[1:])
            gc.enable()
            assert arena.find(kept[-1]) == Region(30, 0, 1)
    finally:
        gc.set_threshold(*before)
        gc.enable()
        gc.unfreeze()

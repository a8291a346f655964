"""Windows: memory in which replies land, and which this process may still write to.

A window is mapped twice. Replies land in the shared mapping; the program reads and writes the private
one. The kernel shows what lands in both, except in pages that the program has written to: these are its
own copies. So landed and written bytes are both there until the writes are forgotten, no other process
sees the writes, and the kernel knows which pages they are on.

Instead of a reply's bytes, another process's memory can be mapped in both. Then parameters arrive without
a copy.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise

import numpy as np

from hubring.ps.core import huge_pages
from hubring.ps.transport import mapping
from hubring.ps.transport.mapping import Arena, Region, Segment, address, copy, plain_memory
from hubring.ps.transport.written_pages import Copies, ReadCopies, Run, ScannedCopies, WatchedCopies

log = logging.getLogger(__name__)


class Windows:
    """The windows of an arena. Safe from any thread.

    Only `Window.forget` drops what this process wrote.

    Args:
        arena: The arena of the windows. Windows, and parts of them, are identified by their regions in it.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = threading.RLock()
        self._refused = False
        self._shown: dict[Region, tuple[object, Region]] = {}
        """By window: the owner and region of the mapped memory."""
        self._copied: dict[Run, set[Run]] = {}
        """The runs of copied pages that were found, by window or part of a window."""

    @cached_property
    def _copies(self) -> Copies:
        """The fastest implementation that this kernel supports."""
        for kind in (WatchedCopies, ScannedCopies, ReadCopies):
            with suppress(OSError):
                return kind()
        log.warning(
            "this kernel does not report which pages a process has written to, so each step compares all"
            " parameters with the last answer, which takes 20 to 60 ms for 100 MiB"
        )
        return Copies()

    def allocate(self, nbytes: int, *, populate: bool) -> Window:
        """Returns a new window of zeros.

        Args:
            nbytes: Size of the window.
            populate: Whether to put it into huge pages now, because no other memory will be mapped in it.
        """
        try:
            landing, seen = self._arena.allocate_window(nbytes)
        except OSError as error:
            log.warning("cannot map parameters twice (%s), so each step compares and copies all", error)
            return Window(_Unmapped(), plain_memory(nbytes), plain_memory(nbytes))
        if populate:
            huge_pages.populate(landing)
        with self._lock:
            self._watch(start := address(seen), start + mapping.rounded(seen.nbytes))
        return Window(self, landing, seen)

    def overlap(self, region: Region) -> bool:
        """Whether another process's memory is mapped in any part of this region."""
        segment = self._arena.segments.get(region.segment)
        if segment is None or not segment.windows:  # as in almost all requests
            return False
        with self._lock:
            return any(
                window.segment == region.segment
                and window.offset < region.offset + region.length
                and region.offset < window.offset + window.length
                for window in self._shown
            )

    def fit(self, region: Region) -> bool:
        """Whether memory can be mapped at this region, in whole pages that hold nothing else."""
        segment = self._arena.segments.get(region.segment)
        if segment is None or not segment.windows or region.offset % mapping.PAGE:
            return False
        if self._refused or not self._copies.exact:
            return False
        end = region.offset + region.length
        return end % mapping.PAGE == 0 or end in segment.windows

    def show(self, window: Region, owner: object, descriptor: int, region: Region) -> None:
        """Maps `region` of `owner`'s open file in a window.

        If the kernel refuses, copies the bytes, and no region fits from then on.

        Raises:
            ValueError: The window cannot map memory.
        """
        if self._shown.get(window) == (owner, region):
            return
        segment = self._arena.segments.get(window.segment)
        if segment is None or not segment.windows:
            raise ValueError(f"{window} is not a window of this process")
        with self._lock:
            self._shown[window] = owner, region
            try:
                self._map(segment, window, descriptor, region.offset, shared=False)
            except OSError as error:
                log.warning("the kernel refused to map parameters (%s); copying them from now on", error)
                self._refused = True
                with suppress(OSError):
                    self.own(window)
                landed = memoryview(bytearray(region.length))
                mapping.read(descriptor, landed, region.offset)
                mapping.write(segment.descriptor, landed, window.offset)

    def own(self, window: Region) -> None:
        """Makes a window this process's own memory again, which others may write to."""
        with self._lock:
            shown = self._shown.pop(window, None)
            segment = self._arena.segments.get(window.segment)
            if shown is not None and segment is not None:
                self._map(segment, window, segment.descriptor, window.offset, shared=True)

    def keep(self, owner: object) -> None:
        """Copies `owner`'s mapped memory to this process's own memory, so that it no longer changes.

        Concurrent readers see the same bytes throughout, except in pages that this process wrote to.
        """
        with self._lock:
            for window, (whose, _) in list(self._shown.items()):
                segment = self._arena.segments.get(window.segment)
                if segment is None:
                    del self._shown[window]
                elif whose is owner:
                    landed = mapping.memory(segment.start + window.offset, window.length)
                    mapping.write(segment.descriptor, landed, window.offset)
                    self.own(window)

    def written(self, start: int, end: int) -> list[Run]:
        """Returns the runs of copied pages between two addresses of a window."""
        with self._lock:
            try:
                found = self._copies.find(start, end)
            except OSError as error:
                self._give_up(error)
                found = [(start, end)]
            if found:
                self._copied.setdefault((start, end), set()).update(found)
            elif not self._copied:
                return found
            return [
                (max(first, start), min(last, end))
                for part in self._copied
                if _overlap(part, (start, end))
                for first, last in self._copied[part]
                if _overlap((first, last), (start, end))
            ]

    def forget(self, start: int, end: int) -> list[Run]:
        """Drops the copies in a window. Returns those that the kernel refuses to drop."""
        refused = []
        with self._lock:
            for run in self.written(start, end):
                try:
                    mapping.forget(*run)
                except OSError:  # the program has locked its memory
                    refused.append(run)
            if self._copied:
                self._copied = {
                    part: runs for part, runs in self._copied.items() if not _overlap(part, (start, end))
                }
        return refused

    def _map(self, segment: Segment, window: Region, descriptor: int, offset: int, *, shared: bool) -> None:
        """Maps a file twice in a window. What this process wrote stays visible."""
        start, nbytes = segment.seen + window.offset, mapping.rounded(window.length)
        landing = segment.start + window.offset
        written = [
            page
            for first, end in self.written(start, start + nbytes)
            for page in _differing_pages(first, landing + first - start, end - first)
        ]
        mapping.show(start, nbytes, descriptor, offset, private=True)
        mapping.show(landing, nbytes, descriptor, offset, private=not shared)
        self._watch(start, start + nbytes)
        for first, content in written:
            mapping.memory(first, mapping.PAGE)[:] = content

    def _watch(self, start: int, end: int) -> None:
        try:
            self._copies.watch(start, end)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.warning("the kernel refused to report written pages (%s); comparing all parameters", error)
        self._copies = Copies()


def _overlap(one: Run, other: Run) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _differing_pages(seen: int, landing: int, nbytes: int) -> Iterator[tuple[int, bytes]]:
    """Yields address and bytes of each page at `seen` that differs from its page at `landing`."""
    ours, theirs = (
        np.frombuffer(mapping.memory(start, nbytes), np.uint8).reshape(-1, mapping.PAGE)
        for start in (seen, landing)
    )
    for page in (ours != theirs).any(axis=1).nonzero()[0].tolist():
        yield seen + page * mapping.PAGE, ours[page].tobytes()


class _Unmapped:
    """Stands for `Windows` where the two sides of a window are separate memory."""

    def written(self, start: int, end: int) -> list[Run]:
        return [(start, end)]

    def forget(self, start: int, end: int) -> list[Run]:
        return [(start, end)]


class Window:
    """Memory of `Windows` that replies land in and that the program of this process may change.

    Attributes:
        landing: Where replies land. Name it, or a part of it, as `into`. Nothing is sent from it after the
            first reply.
        seen: The same bytes, as the program sees them. What it writes there is private, and hides what
            lands on these pages until it is forgotten.
    """

    def __init__(self, windows: Windows | _Unmapped, landing: memoryview, seen: memoryview) -> None:
        self.landing = landing
        self.seen = seen
        self._windows = windows
        self._start = address(seen)
        self._end = self._start + mapping.rounded(max(seen.nbytes, 1))

    def written(self, ends: Sequence[int]) -> list[int]:
        """Returns which parts of the window this process changed since `forget`; empty: none.

        A part counts as changed if what is seen differs from what landed. Ask while no reply is expected:
        once one has landed, parts that only share a page with a changed one differ too.

        Args:
            ends: The end of each part, in bytes, in order.
        """
        runs = self._windows.written(self._start, self._end)
        if not runs:
            return []
        return [
            part
            for part, (start, end) in enumerate(pairwise((0, *ends)))
            if any(
                self._differ(max(start, first - self._start), min(end, last - self._start))
                for first, last in runs
            )
        ]

    def is_written(self) -> bool:
        """Returns whether this process changed the window since `forget`; forgets copies that are equal."""
        if not self._windows.written(self._start, self._end):
            return False
        changed = bool(self.written([self.seen.nbytes]))
        if not changed:
            self.forget()
        return changed

    def _differ(self, start: int, end: int) -> bool:
        return start < end and not np.array_equal(
            np.frombuffer(self.seen[start:end], np.uint8), np.frombuffer(self.landing[start:end], np.uint8)
        )

    def forget(self) -> None:
        """Drops what this process wrote, so that what landed is seen."""
        for first, last in self._windows.forget(self._start, self._end):
            part = slice(first - self._start, min(last - self._start, self.seen.nbytes))
            copy(self.landing[part], self.seen[part])

"""Windows: memory of this process where another process's memory is mapped.

The kernel maps the other process's pages privately. A read returns those pages. A write gives
this process a private copy of the page. So parameters arrive without a copy, and a script that
changes its parameters changes no other process's. The changes last until the next reply lands:
then the copied pages are found and dropped.
"""

from __future__ import annotations

import logging
from functools import cached_property

from hubring.ps.transport.shm import memory_map
from hubring.ps.transport.shm.copies import Copies, own_copies
from hubring.ps.transport.shm.segment import Arena, Region

log = logging.getLogger(__name__)


class Windows:
    """The mapped windows of an arena. For one thread.

    Args:
        arena: The arena of the windows. Windows are identified by their regions in it.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._refused = False
        self._shown: dict[Region, tuple[object, Region]] = {}
        """By window: the owner and region of the mapped memory."""

    @cached_property
    def _copies(self) -> Copies | None:
        return own_copies()

    def overlap(self, region: Region) -> bool:
        """Whether another process's memory is mapped in any part of this region."""
        segment = self._arena.segment(region.segment)
        return (segment is not None and segment.windows is not None) and any(
            window.segment == region.segment
            and window.offset < region.offset + region.length
            and region.offset < window.offset + window.length
            for window in self._shown
        )

    def fit(self, region: Region) -> bool:
        """Whether memory can be mapped at this region, in whole pages that hold nothing else."""
        segment = self._arena.segment(region.segment)
        if self._refused or self._copies is None or segment is None or segment.windows is None:
            return False
        if region.offset % memory_map.PAGE:
            return False
        end = region.offset + region.length
        return end % memory_map.PAGE == 0 or end in segment.windows

    def show(self, window: Region, owner: object, descriptor: int, region: Region) -> None:
        """Maps `region` of `owner`'s open file in a window. This process's changes to the window are lost.

        If the kernel refuses, copies the bytes, and no region fits from then on.

        Raises:
            ValueError: The window cannot map memory.
        """
        segment = self._arena.segment(window.segment)
        if self._copies is None or segment is None:
            raise ValueError(f"{window} is not a window of this process")
        start, nbytes = segment.start + window.offset, memory_map.rounded(region.length)
        try:
            if self._shown.get(window) == (owner, region):
                for first, end in self._copies.find(start, start + nbytes):
                    memory_map.forget(first, end)
            else:
                memory_map.show(start, nbytes, descriptor, region.offset, private=True)
                self._shown[window] = owner, region
                self._copies.watch(start, start + nbytes)
        except OSError as error:
            log.warning("the kernel refused to map parameters (%s); copying them from now on", error)
            self._refused = True
            memory_map.read(descriptor, memory_map.memory(start, region.length), region.offset)

    def own(self, window: Region) -> None:
        """Makes a window this process's own memory again, which others may write to."""
        shown = self._shown.pop(window, None)
        segment = self._arena.segment(window.segment)
        if shown is not None and segment is not None:
            nbytes = memory_map.rounded(shown[1].length)
            memory_map.show(
                segment.start + window.offset, nbytes, segment.descriptor, window.offset, private=False
            )

    def keep(self, owner: object) -> None:
        """Copies `owner`'s mapped memory to this process's own memory, so that it no longer changes.

        Concurrent readers see the same bytes throughout.
        """
        for window, (whose, region) in list(self._shown.items()):
            segment = self._arena.segment(window.segment)
            if segment is None:
                del self._shown[window]
            elif whose is owner:
                seen = memory_map.memory(segment.start + window.offset, region.length)
                memory_map.write(segment.descriptor, seen, window.offset)
                self.own(window)

"""Windows: memory of this process in which another process's is shown.

The kernel maps the other's pages over ours, privately: reading reads them,
and writing gives this process copies of the pages written, which nobody else
sees. So parameters come back without a copy, and a script that writes to its
parameters spoils nobody's. What it wrote lasts until the next reply lands: then
the copied pages are found and dropped.
"""

from __future__ import annotations

import logging
from functools import cached_property

from hubring.ps.transport.shm import memory_map
from hubring.ps.transport.shm.copies import Copies, own_copies
from hubring.ps.transport.shm.segment import Arena, Region

log = logging.getLogger(__name__)


class Windows:
    """What is shown where in an arena. For one thread.

    Args:
        arena: Whose memory the windows lie in; they are named by their places there.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._refused = False
        self._shown: dict[Region, tuple[object, Region]] = {}
        """By window: whose memory is there, and where in it."""

    @cached_property
    def _copies(self) -> Copies | None:
        return own_copies()

    def overlap(self, region: Region) -> bool:
        """Whether somebody else's memory is shown in any part of this region."""
        segment = self._arena.segment(region.segment)
        return (segment is not None and segment.windows is not None) and any(
            window.segment == region.segment
            and window.offset < region.offset + region.length
            and region.offset < window.offset + window.length
            for window in self._shown
        )

    def fit(self, region: Region) -> bool:
        """Whether somebody's memory could be shown at this region, in whole pages and nowhere else."""
        segment = self._arena.segment(region.segment)
        if self._refused or self._copies is None or segment is None or segment.windows is None:
            return False
        if region.offset % memory_map.PAGE:
            return False
        end = region.offset + region.length
        return end % memory_map.PAGE == 0 or end in segment.windows

    def show(self, window: Region, owner: object, descriptor: int, region: Region) -> None:
        """Shows what lies at `region` of `owner`'s open file; what this process wrote there is lost.

        Where the kernel will not have that, it is copied, and no place fits from then on.

        Raises:
            ValueError: Nothing can be shown there.
        """
        segment = self._arena.segment(window.segment)
        if self._copies is None or segment is None:
            raise ValueError(f"{window} is no window of ours")
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
            log.warning("parameters are copied from now on: the kernel refused to show them here (%s)", error)
            self._refused = True
            memory_map.read(descriptor, memory_map.memory(start, region.length), region.offset)

    def own(self, window: Region) -> None:
        """Makes a window show this process's own memory, which others may write into."""
        shown = self._shown.pop(window, None)
        segment = self._arena.segment(window.segment)
        if shown is not None and segment is not None:
            nbytes = memory_map.rounded(shown[1].length)
            memory_map.show(
                segment.start + window.offset, nbytes, segment.descriptor, window.offset, private=False
            )

    def keep(self, owner: object) -> None:
        """Copies what `owner` shows into this process's own memory, where it changes no more.

        Whoever reads meanwhile sees the same bytes all along.
        """
        for window, (whose, region) in list(self._shown.items()):
            segment = self._arena.segment(window.segment)
            if segment is None:
                del self._shown[window]
            elif whose is owner:
                seen = memory_map.memory(segment.start + window.offset, region.length)
                memory_map.write(segment.descriptor, seen, window.offset)
                self.own(window)

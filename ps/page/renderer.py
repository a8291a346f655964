"""The page's sections, made at most once for all who look at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hubring.ps.core.timing import TimeSource
from hubring.ps.observe.journal import Journal
from hubring.ps.page.history import History
from hubring.ps.page.markup_cache import MarkupCache
from hubring.ps.page.rates import Rates
from hubring.ps.page.section import Section
from hubring.ps.page.sections.course import course
from hubring.ps.page.sections.log import log
from hubring.ps.page.sections.picture import picture
from hubring.ps.page.sections.shards import shards
from hubring.ps.page.sections.staleness import staleness
from hubring.ps.page.sections.summary import summary
from hubring.ps.page.sections.waits import waits
from hubring.ps.page.sections.workers import workers
from hubring.ps.page.snapshot import Snapshot, State, states
from hubring.ps.page.status_reader import StatusReader

TICK_SECONDS = 0.3
"""How often a hub is looked at while somebody watches: a change of somebody's state is rendered at once."""

FRESH_SECONDS = 0.65
"""Until when a rendering does for all else. The next look after that makes a new one, in less than 1 s."""

SECTIONS: Mapping[str, Callable[[Snapshot, MarkupCache], Section]] = {
    "summary": summary,
    "picture": picture,
    "workers": workers,
    "course": course,
    "waits": waits,
    "staleness": staleness,
    "shards": shards,
    "log": log,
}
"""In the order of the page, by their ids."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """The page as of one moment."""

    snapshot: Snapshot
    sections: Mapping[str, Section]


class Renderer:
    """Renders one hub's page.

    Args:
        reader: Reads it.
        history: The course of its job.
        journal: Its log.
        clock: Where the time comes from.

    Attributes:
        renderings: How many were made so far.
        cache: What of them is kept.
    """

    def __init__(self, reader: StatusReader, history: History, journal: Journal, clock: TimeSource) -> None:
        self.renderings = 0
        self.cache = MarkupCache()
        self._reader, self._history, self._journal, self._clock = reader, history, journal, clock
        self._rates = Rates()
        self._busy = asyncio.Lock()
        self._last: Rendering | None = None
        self._rendered = 0.0
        self._shown: dict[int, State] = {}

    async def latest(self) -> Rendering:
        """One that is fresh, and shows everybody in the state that they are in now."""
        async with self._busy:
            if self._last is None or not self._does():
                self._last = await self._render()
                self._shown = states(self._last.snapshot.report)
                self._rendered = self._clock.now()
            return self._last

    def _does(self) -> bool:
        if self._clock.now() - self._rendered >= FRESH_SECONDS:
            return False
        return states(self._reader.workers()) == self._shown

    async def _render(self) -> Rendering:
        report = await self._reader.read()
        snapshot = Snapshot.of(report, self._rates, self._history.samples, self._journal.entries())
        self.cache.turn()
        self.renderings += 1
        return Rendering(snapshot, {name: make(snapshot, self.cache) for name, make in SECTIONS.items()})

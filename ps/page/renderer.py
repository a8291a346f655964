"""Renders the page's sections once for all concurrent readers."""

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
"""How often the hub is read while there are watchers. A changed worker state is rendered at once."""

FRESH_SECONDS = 0.65
"""How long a rendering stays valid for other changes. With TICK_SECONDS, the page lags by less than 1 s."""

SECTIONS: Mapping[str, Callable[[Snapshot, MarkupCache], Section]] = {
    "summary": summary,
    "picture": picture,
    "waits": waits,
    "workers": workers,
    "course": course,
    "shards": shards,
    "staleness": staleness,
    "log": log,
}
"""The sections by id, in the order of the page."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """The page at one time."""

    snapshot: Snapshot
    sections: Mapping[str, Section]


class Renderer:
    """Renders one hub's page.

    Args:
        reader: Reads the hub.
        history: The samples of its job.
        journal: Its log.
        clock: The time source.

    Attributes:
        renderings: How many renderings were made so far.
        cache: The markup of the last rendering.
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
        """Returns a fresh rendering that shows the current state of every worker."""
        async with self._busy:
            if self._last is None or not self._is_fresh():
                self._last = await self._render()
                self._shown = states(self._last.snapshot.report)
                self._rendered = self._clock.now()
            return self._last

    def _is_fresh(self) -> bool:
        if self._clock.now() - self._rendered >= FRESH_SECONDS:
            return False
        return states(self._reader.workers()) == self._shown

    async def _render(self) -> Rendering:
        report = await self._reader.read()
        snapshot = Snapshot.of(report, self._rates, self._history.samples, self._journal.entries())
        self.cache.turn()
        self.renderings += 1
        return Rendering(snapshot, {name: make(snapshot, self.cache) for name, make in SECTIONS.items()})

"""Renders the page once for all readers, and sends its changes to all watchers; idle without any.

The complete HTML page has all content before any script runs.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass

from hubring.ps.core.timing import TimeSource
from hubring.ps.observe.logs import Journal
from hubring.ps.page.picture import picture_section
from hubring.ps.page.sections import (
    TEMPLATES,
    MarkupCache,
    Section,
    changes,
    curves_section,
    headline,
    log_section,
    shards_section,
    staleness_section,
    summary_section,
    waits_section,
    workers_section,
)
from hubring.ps.page.snapshot import Rates, Snapshot, WorkerState, states
from hubring.ps.page.status_reader import History, StatusReader

TICK_SECONDS = 0.3
"""How often the hub is read while there are watchers. A changed worker state is rendered at once."""

FRESH_SECONDS = 0.65
"""How long a rendering stays valid for other changes. With TICK_SECONDS, the page lags by less than 1 s."""

SECTIONS: Mapping[str, Callable[[Snapshot, MarkupCache], Section]] = {
    "summary": summary_section,
    "course": curves_section,
    "workers": workers_section,
    "picture": picture_section,
    "waits": waits_section,
    "shards": shards_section,
    "staleness": staleness_section,
    "log": log_section,
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
        self._shown: dict[int, WorkerState] = {}

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


def html_page(rendering: Rendering, *, tables: bool = False, still: bool = False) -> str:
    """Returns the HTML document.

    Args:
        rendering: The content.
        tables: Whether to show tables instead of charts.
        still: Whether to disable the automatic reload of browsers without JavaScript.
    """
    title = headline(rendering.snapshot)
    return TEMPLATES.render("page.html", title=title, sections=rendering.sections, tables=tables, still=still)


def sign_in_page(sentence: str) -> str:
    """Returns the page that asks for the token."""
    return TEMPLATES.render("sign_in.html", title="Sign in", sentence=sentence, tables=False, still=True)


def answer_page(heading: str, sentence: str) -> str:
    """Returns the page that a browser without JavaScript shows after a button."""
    return TEMPLATES.render("answer.html", title=heading, sentence=sentence, tables=False, still=True)


log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 10.0
"""Send a comment after so long without a change, so that watchers can detect a broken connection."""

MOST_NEWS = 3
"""How many messages screen readers announce at once; the log has all."""


class PageWatcher:
    """The updates that one watcher has not received yet.

    A newer element replaces the older one with the same id. A slow watcher therefore costs at most one page
    of memory, and lags by at most the data in transit.
    """

    def __init__(self) -> None:
        self._elements: dict[str, str] = {}
        self._news: list[str] = []
        self._woken = asyncio.Event()
        self._over = False

    def update(self, elements: Mapping[str, str], news: Iterable[str] = ()) -> None:
        """Queues updates.

        Args:
            elements: HTML by the id of the element that it replaces.
            news: Messages for screen readers.
        """
        for name, html in elements.items():
            self._elements.pop(name, None)  # moves to the end: a row must follow its section
            self._elements[name] = html
        self._news = [*self._news, *news][-MOST_NEWS:]
        self._woken.set()

    def end(self) -> None:
        """Ends the watcher's stream after the queued updates."""
        self._over = True
        self._woken.set()

    async def frame(self) -> bytes | None:
        """Waits for the next server-sent event; None at the end of the stream."""
        try:
            await asyncio.wait_for(self._woken.wait(), HEARTBEAT_SECONDS)
        except TimeoutError:
            return b": nothing has changed\n\n"
        self._woken.clear()
        if self._elements or self._news:
            data = json.dumps({"elements": self._elements, "news": self._news})
            self._elements, self._news = {}, []
            if self._over:
                self._woken.set()
            return f"data: {data}\n\n".encode()
        return None if self._over else b": nothing has changed\n\n"


class Broadcast:
    """Sends one hub's page to all watchers.

    Args:
        renderer: Renders the page.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._watchers: set[PageWatcher] = set()
        self._updating: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def watchers(self) -> int:
        """The number of watchers."""
        return len(self._watchers)

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Yields server-sent events: first the whole page, then changes, until the server stops."""
        rendering = await self._renderer.latest()
        watcher = PageWatcher()
        watcher.update({name: section.html for name, section in rendering.sections.items()})
        self._watchers.add(watcher)
        try:
            if self._closed:
                watcher.end()
            elif self._updating is None:
                self._updating = asyncio.create_task(self._send_changes(rendering))
            while (frame := await watcher.frame()) is not None:
                yield frame
            if self._closed:
                yield b"event: end\ndata: {}\n\n"
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._stop()

    def close(self) -> None:
        """Ends every stream."""
        self._closed = True
        for watcher in self._watchers:
            watcher.end()
        self._stop()

    def _stop(self) -> None:
        if self._updating is not None:
            self._updating.cancel()
            self._updating = None

    async def _send_changes(self, before: Rendering) -> None:
        try:
            while True:
                await asyncio.sleep(TICK_SECONDS)
                after = await self._renderer.latest()
                changed, news = changes(before.sections, after.sections), list(_news(before, after))
                if changed or news:
                    for watcher in self._watchers:
                        watcher.update(changed, news)
                before = after
        except Exception:
            log.exception("the status page failed to render")
        finally:
            if self._updating is asyncio.current_task():  # False after `_stop`
                self._updating = None
                for watcher in self._watchers:
                    watcher.end()


def _news(before: Rendering, after: Rendering) -> Iterable[str]:
    """Yields messages for screen readers: new warnings and errors, and workers that became silent."""
    known = before.snapshot.entries[-1].number if before.snapshot.entries else 0
    for entry in after.snapshot.entries:
        if entry.number > known and entry.level != "info":
            yield entry.text
    silent = {worker.rank for worker in before.snapshot.silent}
    for worker in after.snapshot.silent:
        if worker.rank not in silent:
            yield f"rank {worker.rank} is silent"

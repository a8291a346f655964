"""Broadcast: sends page changes to all watchers; idle when there are none."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping

from hubring.ps.page.renderer import TICK_SECONDS, Renderer, Rendering
from hubring.ps.page.section import changes

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 10.0
"""Send a comment after so long without a change, so that watchers can detect a broken connection."""

MOST_NEWS = 3
"""How many messages screen readers announce at once; the log has all."""


class Watcher:
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
        self._watchers: set[Watcher] = set()
        self._updating: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def watchers(self) -> int:
        """The number of watchers."""
        return len(self._watchers)

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Yields server-sent events: first the whole page, then changes, until the server stops."""
        rendering = await self._renderer.latest()
        watcher = Watcher()
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

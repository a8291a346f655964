"""Broadcast: tells everybody who watches what has changed, and does nothing while nobody does."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping

from hubring.ps.page.renderer import TICK_SECONDS, Renderer, Rendering
from hubring.ps.page.section import changes

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 10.0
"""After which silence is broken, so that whoever watches knows that the line holds."""

MOST_NEWS = 3
"""Sentences that are read out at once; the log has all."""


class Watcher:
    """What somebody who watches has not been sent yet.

    What is newer takes the place of what is older under its id, so that somebody who reads slowly costs no
    more memory than one page, and is never behind by more than what is on its way.
    """

    def __init__(self) -> None:
        self._elements: dict[str, str] = {}
        self._news: list[str] = []
        self._woken = asyncio.Event()
        self._over = False

    def tell(self, elements: Mapping[str, str], news: Iterable[str] = ()) -> None:
        """Takes down what to send.

        Args:
            elements: By the ids of those whose places they take.
            news: To be read out.
        """
        for name, html in elements.items():
            self._elements.pop(name, None)  # a row goes after the section that it is in, if both are waiting
            self._elements[name] = html
        self._news = [*self._news, *news][-MOST_NEWS:]
        self._woken.set()

    def end(self) -> None:
        """There will be no more."""
        self._over = True
        self._woken.set()

    async def frame(self) -> bytes | None:
        """What to send next, as a server-sent event; None at the end."""
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
    """Sends one hub's page to all who watch.

    Args:
        renderer: Renders the page.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._watchers: set[Watcher] = set()
        self._telling: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def watchers(self) -> int:
        """How many watch."""
        return len(self._watchers)

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events: first the whole page, then what has changed, until the server ends."""
        rendering = await self._renderer.latest()
        watcher = Watcher()
        watcher.tell({name: section.html for name, section in rendering.sections.items()})
        self._watchers.add(watcher)
        try:
            if self._closed:
                watcher.end()
            elif self._telling is None:
                self._telling = asyncio.create_task(self._tell(rendering))
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
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None

    async def _tell(self, before: Rendering) -> None:
        try:
            while True:
                await asyncio.sleep(TICK_SECONDS)
                after = await self._renderer.latest()
                changed, news = changes(before.sections, after.sections), list(_news(before, after))
                if changed or news:
                    for watcher in self._watchers:
                        watcher.tell(changed, news)
                before = after
        except Exception:
            log.exception("the status page cannot be made")
        finally:
            if self._telling is asyncio.current_task():  # not where `_stop` has let it go
                self._telling = None
                for watcher in self._watchers:
                    watcher.end()


def _news(before: Rendering, after: Rendering) -> Iterable[str]:
    """What somebody should hear who does not see the page: warnings, errors, and who fell silent."""
    known = before.snapshot.entries[-1].number if before.snapshot.entries else 0
    for entry in after.snapshot.entries:
        if entry.number > known and entry.level != "info":
            yield entry.text
    silent = {worker.rank for worker in before.snapshot.silent}
    for worker in after.snapshot.silent:
        if worker.rank not in silent:
            yield f"rank {worker.rank} is silent"

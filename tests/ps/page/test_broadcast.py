"""A page that is watched is sent what has changed; one that is not costs nothing."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from starlette.types import ASGIApp, Message

from hubring.ps.observe.logs import Journal
from hubring.ps.page.renderer import (
    FRESH_SECONDS,
    MOST_NEWS,
    SECTIONS,
    TICK_SECONDS,
    Broadcast,
    PageWatcher,
    Renderer,
)
from hubring.ps.page.routes import app
from hubring.ps.page.status_reader import History, StatusReader
from tests.support.fakes.clock import FakeTime
from tests.support.pages.asgi import ask, watching
from tests.support.pages.status_hub import TOKEN, StatusHub, journal


class Stage:
    """A page whose ticks come when the clock is turned."""

    def __init__(self, workers: int = 4, log: Journal | None = None) -> None:
        self.hub = StatusHub(workers)
        self.time = FakeTime()
        self.journal = log or journal()
        reader = StatusReader(self.hub.reporter)
        self.renderer = Renderer(reader, History(), self.journal, self.time)
        self.broadcast = Broadcast(self.renderer)
        self.app: ASGIApp = app(
            self.hub.coordinator, reader, self.renderer, self.broadcast, TOKEN, public=True
        )

    def tick(self) -> None:
        self.time.advance(1.0)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubring.ps.page.renderer.TICK_SECONDS", 0.0)


async def told(messages: asyncio.Queue[Message]) -> dict[str, Any]:
    """The next event's data."""
    while True:
        message = await messages.get()
        body = message.get("body", b"").decode()
        if body.startswith("data: "):
            found: dict[str, Any] = json.loads(body.removeprefix("data: "))
            return found


async def test_a_new_watcher_is_sent_the_whole_page() -> None:
    stage = Stage()
    async with watching(stage.app, "/events") as messages:
        start = await messages.get()
        assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
        assert (await told(messages))["elements"].keys() == SECTIONS.keys()


async def test_nothing_is_rendered_while_nobody_watches() -> None:
    stage = Stage()
    async with watching(stage.app, "/events") as messages:
        await told(messages)
    assert stage.broadcast.watchers == 0
    rendered, asked = stage.renderer.renderings, stage.hub.asked
    for _ in range(10):
        stage.tick()
        await asyncio.sleep(0)
    assert (stage.renderer.renderings, stage.hub.asked) == (rendered, asked) == (1, 1)


async def test_the_page_is_rendered_once_for_all_watchers() -> None:
    stage = Stage()
    async with (
        watching(stage.app, "/events") as first,
        watching(stage.app, "/events") as second,
        watching(stage.app, "/events") as third,
    ):
        for messages in (first, second, third):
            await told(messages)
        assert stage.renderer.renderings == 1
        stage.tick()
        stage.hub.told["step"] = 41
        changes = [await told(messages) for messages in (first, second, third)]
        assert changes[0] == changes[1] == changes[2]
        assert stage.renderer.renderings == 2
        assert (await ask(stage.app, "/")).status == 200
        assert stage.renderer.renderings == 2, "who loads the page sees the same rendering"


async def test_with_many_workers_a_tick_costs_what_has_changed() -> None:
    stage = Stage(workers=64)
    async with watching(stage.app, "/events") as messages:
        whole = len(json.dumps(await told(messages)))
        made = stage.renderer.cache.made
        stage.tick()
        for rank in (3, 17, 40):
            stage.hub.told["workers"][rank]["step"] = 41
        change = await told(messages)
        assert change["elements"].keys() == {"worker-3", "worker-17", "worker-40"}
        assert "41" in change["elements"]["worker-3"]
        assert change["news"] == []
        assert stage.renderer.cache.made == made + 3
        assert len(json.dumps(change)) < whole / 20


async def test_warnings_and_silence_are_read_out_and_nothing_else() -> None:
    stage = Stage(log=journal("an old warning", level="warning"))
    async with watching(stage.app, "/events") as messages:
        assert (await told(messages))["news"] == []
        stage.tick()
        stage.journal.handle(journal_record("rank 3 joined", "INFO"))
        assert (await told(messages))["news"] == []
        stage.tick()
        stage.journal.handle(journal_record("rank 3 failed: x", "WARNING"))
        stage.hub.told["workers"][1]["seconds_since_heartbeat"] = 2.0
        assert (await told(messages))["news"] == ["rank 3 failed: x", "rank 1 is silent"]
        stage.tick()
        stage.hub.told["workers"][1]["seconds_since_heartbeat"] = 3.0
        assert (await told(messages))["news"] == [], "it was silent before"


async def test_a_browser_that_comes_after_the_end_learns_of_it_at_once() -> None:
    stage = Stage()
    stage.broadcast.close()
    async with watching(stage.app, "/events") as messages:
        ends = [await messages.get() for _ in range(4)]
        assert ends[2]["body"].endswith(b"event: end\ndata: {}\n\n")


async def test_a_page_that_cannot_be_made_ends_the_streams_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage()
    async with watching(stage.app, "/events") as messages:
        await told(messages)
        stage.tick()
        del stage.hub.told["workers"]
        while (message := await messages.get()).get("more_body", True):
            assert b"event: end" not in message.get("body", b""), "so that browsers try again"
    assert "the status page failed to render" in caplog.text


async def test_a_slow_watcher_gets_the_newest_of_each_element_in_order() -> None:
    watcher = PageWatcher()
    watcher.update({"worker-1": "old", "log": "old"}, ["a"])
    watcher.update({"workers": "section"}, ["b", "c", "d"])
    watcher.update({"worker-1": "new"})
    frame = await watcher.frame()
    assert frame is not None
    data = json.loads(frame.decode().removeprefix("data: "))
    assert list(data["elements"].items()) == [("log", "old"), ("workers", "section"), ("worker-1", "new")]
    assert data["news"] == ["b", "c", "d"]
    assert len(data["news"]) == MOST_NEWS


async def test_a_quiet_hub_still_shows_that_the_line_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubring.ps.page.renderer.HEARTBEAT_SECONDS", 0.0)

    assert await PageWatcher().frame() == b": nothing has changed\n\n"


def journal_record(text: str, level: str) -> Any:
    return logging.makeLogRecord({"msg": text, "levelname": level, "levelno": logging.INFO})


async def test_a_fresh_rendering_does_until_somebodys_state_changes() -> None:
    stage = Stage()
    async with watching(stage.app, "/events") as messages:
        await told(messages)
        stage.time.advance(0.5)
        stage.hub.told["step"] = 41
        for _ in range(5):
            await asyncio.sleep(0)
        assert stage.renderer.renderings == 1
        stage.hub.told["workers"][2]["seconds_since_heartbeat"] = 2.0
        change = await told(messages)
        assert "silent for 2" in change["elements"]["worker-2"]
        assert "41" in change["elements"]["summary"]
        assert stage.renderer.renderings == 2


def test_the_page_is_less_than_a_second_behind() -> None:
    assert FRESH_SECONDS + TICK_SECONDS < 1.0

"""The page of a fake hub, and one answer of it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any

from starlette.types import ASGIApp

from hubring.ps.observe.logs import Journal
from hubring.ps.page.renderer import Broadcast, Renderer
from hubring.ps.page.routes import app
from hubring.ps.page.status_reader import History, StatusReader
from tests.support.fakes.clock import FakeTime
from tests.support.pages.asgi import Answer
from tests.support.pages.status_hub import TOKEN, StatusHub

FORM = {"content-type": "application/x-www-form-urlencoded"}


def page_app(hub: StatusHub, names: Collection[str] = (), *, public: bool = False) -> ASGIApp:
    reader = StatusReader(hub.reporter)
    renderer = Renderer(reader, History(), Journal(), FakeTime())
    return app(hub.coordinator, reader, renderer, Broadcast(renderer), TOKEN, names, public=public)


def run(story: Coroutine[Any, Any, Answer]) -> Answer:
    return asyncio.run(asyncio.wait_for(story, 20.0))

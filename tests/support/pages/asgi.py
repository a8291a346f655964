"""Sends requests to an ASGI app without an HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message


@dataclass
class Answer:
    """A response."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def text(self) -> str:
        return self.body.decode()


class Exchange:
    """One running request."""

    def __init__(self, body: bytes) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.gone = asyncio.Event()
        self._body: list[bytes] = [body]

    async def receive(self) -> Message:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.messages.put_nowait(message)


def scope(method: str, address: str, headers: Mapping[str, str]) -> dict[str, Any]:
    path, _, query = address.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
    }


async def ask(app: ASGIApp, address: str, method: str = "GET", body: bytes = b"", **headers: str) -> Answer:
    """Returns the whole response to one request."""
    exchange, answer = Exchange(body), Answer()
    await app(scope(method, address, headers), exchange.receive, exchange.send)
    while not exchange.messages.empty():
        message = exchange.messages.get_nowait()
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            answer.body += message.get("body", b"")
    return answer


@asynccontextmanager
async def watching(app: ASGIApp, address: str) -> AsyncIterator[asyncio.Queue[Message]]:
    """Yields the parts of an endless response, and disconnects at the end."""
    exchange = Exchange(b"")
    serving = asyncio.ensure_future(app(scope("GET", address, {}), exchange.receive, exchange.send))
    try:
        yield exchange.messages
    finally:
        exchange.gone.set()
        await serving

"""The HTTP routes. A GET request never changes anything."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from importlib.resources import files

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hubring.ps.coordinator.shard_fleet import LOOK_SECONDS
from hubring.ps.core.errors import ConfigError, HubringError
from hubring.ps.observe import metrics
from hubring.ps.page.broadcast import Broadcast
from hubring.ps.page.html_page import answer, page
from hubring.ps.page.kit.style import style
from hubring.ps.page.renderer import Renderer
from hubring.ps.page.request_token import Endpoint, objection, sent
from hubring.ps.page.sign_in import SignIn
from hubring.ps.page.status_reader import Hub, StatusReader

log = logging.getLogger(__name__)

ASKED_SECONDS = LOOK_SECONDS + 0.2
"""How long JSON and metrics wait for a shard. It is longer than the hub's own limit, so that the hub's error
appears in them."""

FILES = {"page.js": "text/javascript", "sign-in.js": "text/javascript", "icon.svg": "image/svg+xml"}
"""Static files of the page, and their media types."""

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every response. They forbid foreign content in the page, and the page in foreign sites."""


def app(
    hub: Hub,
    reader: StatusReader,
    renderer: Renderer,
    broadcast: Broadcast,
    token: str,
    names: Collection[str] = (),
    *,
    public: bool = False,
) -> ASGIApp:
    """Returns the app that the listener serves.

    Args:
        hub: The hub that the buttons control.
        reader: Reads the hub's status.
        renderer: Renders the page.
        broadcast: Sends the page's changes.
        token: The token that a button's request must have, and a reader's.
        names: The accepted host names, IPv6 in brackets; empty to accept all.
        public: Whether anybody may read the page. /metrics is always public.
    """
    looks = _Looks(reader, renderer, broadcast)
    guard, reader_guard = _Guard(token), SignIn(token, public=public)
    actions = _Actions(hub)
    return _Headed(
        Starlette(
            routes=[
                Route("/", reader_guard.before(looks.page, html=True)),
                Route("/events", reader_guard.before(looks.events)),
                Route("/status.json", reader_guard.before(looks.status)),
                Route("/sign-in", reader_guard.endpoint, methods=["POST"]),
                Route("/metrics", looks.metrics),
                Route("/page.css", _shipped(style(__package__), "text/css")),
                *(Route(f"/{name}", _shipped(_file(name), kind)) for name, kind in FILES.items()),
                Route("/checkpoint", guard.before(actions.checkpoint), methods=["POST"]),
                Route("/drain", guard.before(actions.drain), methods=["POST"]),
                Route("/end", guard.before(actions.end), methods=["POST"]),
            ]
        ),
        names,
    )


class _Headed:
    """Adds `HEADERS` to every response of an app, and checks the Host header.

    With `names`, requests to other host names are refused. This prevents DNS rebinding: a foreign page whose
    name resolves to this machine could otherwise read a page that only loopback can reach.
    """

    def __init__(self, inner: ASGIApp, names: Collection[str]) -> None:
        self._inner = inner
        self._names = names
        self._headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self._headers]}
            await send(message)

        if self._names and (called := _called(scope)) not in self._names:
            refusal = PlainTextResponse(f"Unknown host {called}; use the address in the hub's banner.", 421)
            await refusal(scope, receive, send_headed)
            return
        await self._inner(scope, receive, send_headed)


def _called(scope: Scope) -> str:
    """Returns the request's host name without the port."""
    host: str = dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
    return host if host.endswith("]") else host.rpartition(":")[0] or host


class _Looks:
    """The endpoints that only read."""

    def __init__(self, reader: StatusReader, renderer: Renderer, broadcast: Broadcast) -> None:
        self._reader, self._renderer, self._broadcast = reader, renderer, broadcast

    async def page(self, request: Request) -> Response:
        asked = request.query_params
        rendering = await self._renderer.latest()
        return HTMLResponse(page(rendering, tables=asked.get("view") == "tables", still="still" in asked))

    async def events(self, request: Request) -> Response:
        return _Events(self._broadcast.watch())

    async def status(self, request: Request) -> Response:
        return JSONResponse(await self._reader.read(ASKED_SECONDS))

    async def metrics(self, request: Request) -> Response:
        return Response(
            metrics.exposition(await self._reader.read(ASKED_SECONDS)), media_type=metrics.CONTENT_TYPE
        )


class _Events(StreamingResponse):
    """A stream that is closed with its request, not at garbage collection."""

    def __init__(self, watch: AsyncGenerator[bytes, None]) -> None:
        super().__init__(watch, media_type="text/event-stream")
        self._watch = watch

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._watch):
            await super().stream_response(send)


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text()


def _shipped(content: str, kind: str) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        return Response(content, media_type=kind)

    return endpoint


class _Actions:
    """The actions of the buttons; each returns a message for the user."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def checkpoint(self) -> str:
        path, step = await self._hub.save()
        return f"Step {step} is saved in {path}."

    async def drain(self) -> str:
        log.warning("draining: requested on the status page")
        await self._hub.drain()
        return "Every worker finishes its step and leaves; then the server stops."

    async def end(self) -> str:
        await self._hub.end("a user ended the job on the status page")
        lost = "steps after the last checkpoint are lost, or all steps without --checkpoint-dir"
        return f"The job ends now; {lost}."


class _Guard:
    """Checks the token, which is in a header or in a form's field."""

    def __init__(self, token: str) -> None:
        self._token = token

    def before(self, action: Callable[[], Awaitable[str]]) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            given, by_form = await sent(request)
            status, sentence = await self._answer(given, action)
            if not by_form:
                return PlainTextResponse(sentence, status)
            return HTMLResponse(answer("Done" if status == 200 else "Failed", sentence), status)

        return endpoint

    async def _answer(self, given: str, action: Callable[[], Awaitable[str]]) -> tuple[int, str]:
        if text := objection(given, self._token):
            return 403, text
        try:
            return 200, await action()
        except ConfigError as error:
            return 409, f"Failed: {error}."
        except HubringError as error:
            return 503, f"Failed: {error}."

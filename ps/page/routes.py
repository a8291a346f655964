"""The HTTP routes, and who may use them. A GET request never changes anything.

The token is in a header, or in a form's field. The page itself can be read with the token, or with a
cookie that stands for it. A browser cannot add a header to a link, so `/sign-in` sets the cookie.
Browsers send a host's cookies to each of its ports, also to those of other users. So the cookie's value
is not the token, and presses no button.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from importlib.resources import files
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hubring.ps.coordinator.coordinator import Coordinator
from hubring.ps.coordinator.shard_fleet import LOOK_SECONDS
from hubring.ps.core.errors import ConfigError, HubringError
from hubring.ps.observe import metrics
from hubring.ps.page.kit.templating import style_sheet
from hubring.ps.page.renderer import Broadcast, Renderer, answer_page, html_page, sign_in_page
from hubring.ps.page.site import is_same_token
from hubring.ps.page.status_reader import StatusReader

FORM_BYTES = 4096
"""Largest accepted form, in bytes."""

FORM_SECONDS = 5.0
"""How long a form can take to arrive."""

BANNER = "the banner of ps-server start shows it after #token=, or names its file (see --page-token-file)"

Endpoint = Callable[[Request], Awaitable[Response]]


def token_objection(given: str, token: str) -> str:
    """Returns why a token is refused; empty if it is the page's `token`."""
    return "" if is_same_token(given, token) else f"The token is {'wrong' if given else 'missing'}: {BANNER}."


async def sent_token(request: Request) -> tuple[str, bool]:
    """Returns the request's token, or an empty string, and whether the request is a form."""
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return given.strip(), False
    body = b""
    try:
        async with asyncio.timeout(FORM_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > FORM_BYTES:
                    return "", True
    except (TimeoutError, ClientDisconnect):
        return "", True
    return parse_qs(body.decode(errors="replace")).get("token", [""])[0].strip(), True


NEEDED = f"This page needs its token: {BANNER}."


class SignIn:
    """Lets readers in.

    Args:
        token: The page's token.
        public: Whether reading needs no token.
    """

    def __init__(self, token: str, *, public: bool) -> None:
        self._token = token
        self._public = public
        self._cookie = hashlib.blake2s(token.encode(), person=b"reader").hexdigest()

    def before(self, endpoint: Endpoint, *, html: bool = False) -> Endpoint:
        """Returns an endpoint that refuses requests without the token; in a browser with a form for it."""

        async def guarded(request: Request) -> Response:
            if self._public or await self._lets(request):
                return await endpoint(request)
            return HTMLResponse(sign_in_page(NEEDED), 403) if html else PlainTextResponse(NEEDED, 403)

        return guarded

    async def endpoint(self, request: Request) -> Response:
        """Sets the cookie if the request has the token."""
        given, by_form = await sent_token(request)
        if text := token_objection(given, self._token):
            return HTMLResponse(sign_in_page(text), 403) if by_form else PlainTextResponse(text, 403)
        reply = RedirectResponse("/", 303) if by_form else Response(status_code=204)
        reply.set_cookie(_cookie_name(request), self._cookie, httponly=True, samesite="strict")
        return reply

    async def _lets(self, request: Request) -> bool:
        if is_same_token(request.cookies.get(_cookie_name(request), ""), self._cookie):
            return True
        given, _ = await sent_token(request) if "authorization" in request.headers else ("", False)
        return is_same_token(given, self._token)


def _cookie_name(request: Request) -> str:
    """Returns the name of the cookie. Several servers of a host share its cookies."""
    _, port = request.scope["server"]
    return f"hubring-page-{port}"


log = logging.getLogger(__name__)

ASKED_SECONDS = LOOK_SECONDS + 0.2
"""How long JSON and metrics wait for a shard. It is longer than the hub's own limit, so that the hub's error
appears in them."""

STATIC_FILES = {"page.js": "text/javascript", "sign-in.js": "text/javascript", "icon.svg": "image/svg+xml"}
"""Static files of the page, and their media types."""

RESPONSE_HEADERS = {
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
    hub: Coordinator,
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
        public: Whether reading the page needs no token. /metrics is always public.
    """
    looks = _Looks(reader, renderer, broadcast)
    sign_in, actions = SignIn(token, public=public), _Actions(hub, token)
    return _Headed(
        Starlette(
            routes=[
                Route("/", sign_in.before(looks.page, html=True)),
                Route("/events", sign_in.before(looks.events)),
                Route("/status.json", sign_in.before(looks.status)),
                Route("/sign-in", sign_in.endpoint, methods=["POST"]),
                Route("/metrics", looks.metrics),
                Route("/page.css", _shipped(style_sheet(__package__), "text/css")),
                *(Route(f"/{name}", _shipped(_file(name), kind)) for name, kind in STATIC_FILES.items()),
                Route("/checkpoint", actions.guarded(actions.checkpoint), methods=["POST"]),
                Route("/drain", actions.guarded(actions.drain), methods=["POST"]),
                Route("/end", actions.guarded(actions.end), methods=["POST"]),
            ]
        ),
        names,
    )


class _Headed:
    """Adds `RESPONSE_HEADERS` to every response of an app, and checks the Host header.

    With `names`, requests to other host names are refused. This prevents DNS rebinding: a foreign page whose
    name resolves to this machine could otherwise read a page that only loopback can reach.
    """

    def __init__(self, inner: ASGIApp, names: Collection[str]) -> None:
        self._inner = inner
        self._names = names
        self._headers = [(name.encode(), value.encode()) for name, value in RESPONSE_HEADERS.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self._headers]}
            await send(message)

        inner = self._inner
        if self._names and (called := _called(scope)) not in self._names:
            inner = PlainTextResponse(f"Unknown host {called}; use the address in the hub's banner.", 421)
        await inner(scope, receive, send_headed)


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
        page = html_page(rendering, tables=asked.get("view") == "tables", still="still" in asked)
        return HTMLResponse(page)

    async def events(self, request: Request) -> Response:
        return _Events(self._broadcast.watch())

    async def status(self, request: Request) -> Response:
        return JSONResponse(await self._reader.read(ASKED_SECONDS))

    async def metrics(self, request: Request) -> Response:
        report = await self._reader.read(ASKED_SECONDS)
        return Response(metrics.exposition(report), media_type=metrics.CONTENT_TYPE)


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
    """The actions of the buttons; each returns a message for the user, if the request has the token."""

    def __init__(self, hub: Coordinator, token: str) -> None:
        self._hub, self._token = hub, token

    def guarded(self, action: Callable[[], Awaitable[str]]) -> Endpoint:
        """Returns an endpoint for an action. The token is in a header or in a form's field."""

        async def endpoint(request: Request) -> Response:
            given, by_form = await sent_token(request)
            status, sentence = 403, token_objection(given, self._token)
            try:
                if not sentence:
                    status, sentence = 200, await action()
            except HubringError as error:
                status, sentence = 409 if isinstance(error, ConfigError) else 503, f"Failed: {error}."
            if not by_form:
                return PlainTextResponse(sentence, status)
            return HTMLResponse(answer_page("Done" if status == 200 else "Failed", sentence), status)

        return endpoint

    async def checkpoint(self) -> str:
        path, step = await self._hub.checkpoints.save()
        return f"Step {step} is saved in {path}."

    async def drain(self) -> str:
        log.warning("draining: requested on the status page")
        await self._hub.drain()
        return "Every worker finishes its step and leaves; then the server stops."

    async def end(self) -> str:
        await self._hub.end("a user ended the job on the status page")
        lost = "steps after the last checkpoint are lost, or all steps without --checkpoint-dir"
        return f"The job ends now; {lost}."

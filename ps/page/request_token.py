"""The token in a request: in a header, or in a form's field."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import Response

from hubring.ps.page.token import same

FORM_BYTES = 4096
"""Largest accepted form, in bytes."""

FORM_SECONDS = 5.0
"""How long a form can take to arrive."""

BANNER = "the banner of ps-server start shows it after #token=, or names its file (see --page-token-file)"

Endpoint = Callable[[Request], Awaitable[Response]]


def objection(given: str, token: str) -> str:
    """Returns why a token is refused; empty if it is the page's `token`."""
    return "" if same(given, token) else f"The token is {'wrong' if given else 'missing'}: {BANNER}."


async def sent(request: Request) -> tuple[str, bool]:
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
    except TimeoutError:
        return "", True
    return parse_qs(body.decode(errors="replace")).get("token", [""])[0].strip(), True

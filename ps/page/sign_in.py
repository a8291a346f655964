"""Who may read the page: requests with the token, or with a cookie that stands for it.

A browser cannot add a header to a link, so `/sign-in` sets the cookie. Browsers send a host's cookies to each
of its ports, also to those of other users. So the cookie's value is not the token, and presses no button.
"""

from __future__ import annotations

import hashlib

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

from hubring.ps.page import token as tokens
from hubring.ps.page.html_page import sign_in
from hubring.ps.page.request_token import BANNER, Endpoint, objection, sent

NEEDED = f"This page needs its token: {BANNER}."


class SignIn:
    """Lets readers in.

    Args:
        token: The page's token.
        public: Whether anybody may read.
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
            return HTMLResponse(sign_in(NEEDED), 403) if html else PlainTextResponse(NEEDED, 403)

        return guarded

    async def endpoint(self, request: Request) -> Response:
        """Sets the cookie if the request has the token."""
        given, by_form = await sent(request)
        if text := objection(given, self._token):
            return HTMLResponse(sign_in(text), 403) if by_form else PlainTextResponse(text, 403)
        reply = RedirectResponse("/", 303) if by_form else Response(status_code=204)
        reply.set_cookie(_name(request), self._cookie, httponly=True, samesite="strict")
        return reply

    async def _lets(self, request: Request) -> bool:
        if tokens.same(request.cookies.get(_name(request), ""), self._cookie):
            return True
        given, _ = await sent(request) if "authorization" in request.headers else ("", False)
        return tokens.same(given, self._token)


def _name(request: Request) -> str:
    """Returns the name of the cookie. Several servers of a host share its cookies."""
    _, port = request.scope["server"]
    return f"hubring-page-{port}"

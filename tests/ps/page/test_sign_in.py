"""Only who has the token reads the page, unless it is public; metrics and static files need none."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.support.pages.asgi import Answer, ask
from tests.support.pages.html_tree import html_tree
from tests.support.pages.page_app import FORM, page_app, run
from tests.support.pages.status_hub import TOKEN, StatusHub

GUARDED = ("/", "/?view=tables", "/?still=1", "/status.json", "/events")
OPEN = ("/metrics", "/page.css", "/page.js", "/sign-in.js", "/icon.svg")


def look(address: str, headers: Mapping[str, str]) -> Coroutine[Any, Any, Answer]:
    return ask(page_app(StatusHub()), address, "GET", b"", **headers)


def signed_in() -> str:
    """The cookie of a reader."""
    reply = run(ask(page_app(StatusHub()), "/sign-in", "POST", authorization=f"Bearer {TOKEN}"))
    assert reply.status == 204
    cookie, *attributes = reply.headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=strict"} <= set(attributes)
    return cookie


@pytest.mark.parametrize("address", GUARDED)
@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer another"}, {"cookie": f"hubring-page-80={TOKEN}"}, {"cookie": "x"}],
)
def test_without_the_token_nothing_is_shown(address: str, headers: dict[str, str]) -> None:
    refused = run(look(address, headers))
    assert refused.status == 403
    assert "needs its token: the banner of ps-server start" in refused.text
    assert "train.py" not in refused.text


@pytest.mark.parametrize("address", OPEN)
def test_metrics_and_static_files_need_no_token(address: str) -> None:
    assert run(ask(page_app(StatusHub()), address)).status == 200


def test_the_token_or_its_cookie_shows_the_page() -> None:
    for headers in ({"authorization": f"Bearer {TOKEN}"}, {"cookie": signed_in()}):
        shown = run(look("/", headers))
        assert shown.status == 200
        assert "train.py" in shown.text
        assert run(look("/status.json", headers)).status == 200


def test_the_cookie_is_not_the_token_and_presses_no_button() -> None:
    hub, cookie = StatusHub(), signed_in()
    value = cookie.partition("=")[2]
    assert value != TOKEN
    assert run(ask(page_app(hub), "/end", "POST", cookie=cookie)).status == 403
    assert run(ask(page_app(hub), "/end", "POST", authorization=f"Bearer {value}")).status == 403
    assert hub.done == []


def test_a_browser_gets_a_form_for_the_token() -> None:
    form = html_tree(run(ask(page_app(StatusHub()), "/")).text).one("form")
    assert (form.attributes["method"], form.attributes["action"]) == ("post", "/sign-in")
    right = run(ask(page_app(StatusHub()), "/sign-in", "POST", urlencode({"token": TOKEN}).encode(), **FORM))
    assert (right.status, right.headers["location"]) == (303, "/")
    assert "set-cookie" in right.headers
    wrong = run(ask(page_app(StatusHub()), "/sign-in", "POST", urlencode({"token": "x"}).encode(), **FORM))
    assert wrong.status == 403
    assert "The token is wrong" in wrong.text
    assert "set-cookie" not in wrong.headers


@pytest.mark.parametrize("address", [address for address in GUARDED if address != "/events"])
def test_anybody_reads_a_public_page_and_presses_no_button(address: str) -> None:
    hub = StatusHub()
    assert run(ask(page_app(hub, public=True), address)).status == 200
    assert run(ask(page_app(hub, public=True), "/end", "POST")).status == 403
    assert hub.done == []

"""The routes: looking changes nothing, acting needs the token. test_sign_in.py is about readers."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any
from urllib.parse import urlencode

import pytest

from hubring.ps.core.errors import ConfigError, JobFailed
from hubring.ps.observe import metrics
from hubring.ps.page.routes import RESPONSE_HEADERS
from hubring.ps.page.status_reader import StatusReader
from tests.support.pages.asgi import ask
from tests.support.pages.html_tree import html_tree
from tests.support.pages.page_app import FORM, page_app, run
from tests.support.pages.status_hub import TOKEN, StatusHub

serve = partial(page_app, public=True)
ACTIONS = ("/checkpoint", "/drain", "/end")
FILES = ("/page.css", "/page.js", "/sign-in.js", "/icon.svg")
LOOKS = ("/", "/?view=tables", "/?still=1", "/status.json", "/metrics", *FILES)


def bearer(token: str) -> str:
    return f"Bearer {token}"


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("token", ["", "another token that is long enough", TOKEN[:-1], TOKEN + "x", "ö"])
def test_without_the_token_nothing_happens_and_a_sentence_says_why(action: str, token: str) -> None:
    hub = StatusHub()
    for refused in (
        run(ask(serve(hub), action, "POST", authorization=bearer(token))),
        run(ask(serve(hub), action, "POST", urlencode({"token": token}).encode(), **FORM)),
    ):
        assert refused.status == 403
        assert "--page-token-file" in refused.text
        assert TOKEN not in refused.text.replace(TOKEN + "x", "")
    assert hub.done == []


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("body", [b"", b"token", b"\xff\xfe=\xff", b"token=" + b"x" * 100_000])
def test_a_form_that_is_none_is_refused(action: str, body: bytes) -> None:
    hub = StatusHub()
    assert run(ask(serve(hub), action, "POST", body, **FORM)).status == 403
    assert hub.done == []


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS"])
def test_only_post_acts(action: str, method: str) -> None:
    hub = StatusHub()
    assert run(ask(serve(hub), action, method, authorization=bearer(TOKEN))).status == 405
    assert hub.done == []


@pytest.mark.parametrize(
    ("action", "done", "words"),
    [
        ("/checkpoint", "save", "Step 40 is saved in /checkpoints/step-40."),
        ("/drain", "drain", "then the server stops"),
        ("/end", "end: a user ended the job on the status page", "The job ends now"),
    ],
)
def test_with_the_token_it_happens_and_a_sentence_says_so(action: str, done: str, words: str) -> None:
    hub = StatusHub()
    told = run(ask(serve(hub), action, "POST", authorization=bearer(TOKEN)))
    assert (told.status, hub.done) == (200, [done])
    assert words in told.text
    assert told.headers["content-type"].startswith("text/plain")


def test_a_form_gets_a_page_for_its_answer() -> None:
    hub = StatusHub()
    told = run(ask(serve(hub), "/checkpoint", "POST", urlencode({"token": f" {TOKEN} "}).encode(), **FORM))
    assert (told.status, hub.done) == (200, ["save"])
    page = html_tree(told.text)
    assert page.one("h1").text == "Done"
    assert "Step 40 is saved" in page.one("main").text


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (ConfigError("the server was started without --checkpoint-dir"), 409),
        (JobFailed("shard 0 does not answer"), 503),
    ],
)
def test_a_refused_action_returns_the_reason(refusal: ConfigError | JobFailed, status: int) -> None:
    hub = StatusHub()
    hub.refusal = refusal
    told = run(ask(serve(hub), "/checkpoint", "POST", authorization=bearer(TOKEN)))
    assert (told.status, told.text) == (status, f"Failed: {refusal}.")


def test_looking_changes_nothing_and_every_answer_forbids_what_the_page_does_not_need() -> None:
    hub = StatusHub()
    for address in (*LOOKS, "/nowhere", "/end"):
        answer = run(ask(serve(hub), address))
        assert (answer.status == 200) is (address in LOOKS)
        assert RESPONSE_HEADERS.items() <= answer.headers.items(), address
    assert hub.done == []
    policy = RESPONSE_HEADERS["content-security-policy"]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def test_the_status_is_the_hubs_own() -> None:
    hub = StatusHub()
    told = json.loads(run(ask(serve(hub), "/status.json")).text)
    assert told == hub.report(hub.rows)


def test_the_metrics_are_made_of_the_same_report() -> None:
    hub = StatusHub()
    answer = run(ask(serve(hub), "/metrics"))
    assert answer.headers["content-type"] == metrics.CONTENT_TYPE
    assert answer.body == metrics.exposition(hub.report(hub.rows))


@pytest.mark.parametrize("name", FILES)
def test_the_files_of_the_page_come_with_the_package(name: str) -> None:
    answer = run(ask(serve(StatusHub()), name))
    kind = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}[name.rpartition(".")[2]]
    assert answer.headers["content-type"].startswith(kind)
    assert len(answer.body) > 100
    assert b"//" not in answer.body.replace(b"http://www.w3.org/", b"").replace(b"// ", b""), "no other host"


def test_a_view_of_tables_is_the_same_page() -> None:
    hub = StatusHub()
    drawn, tables = (run(ask(serve(hub), address)).text for address in ("/", "/?view=tables"))
    assert html_tree(tables).one("body").attributes["class"] == "tables"
    assert "class" not in html_tree(drawn).one("body").attributes
    assert html_tree(tables).one("main").text.replace("Charts", "Tables instead of charts") == (
        html_tree(drawn).one("main").text
    )


async def test_a_shard_that_does_not_answer_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hubring.ps.page.status_reader.SHARD_SECONDS", 0.01)

    hub = StatusHub()
    reader = StatusReader(hub.reporter)
    first = await reader.read()
    hub.may_answer.clear()
    hub.rows[0]["pushes"] = 161
    for _ in range(2):
        told = await reader.read()
        assert told["shards"] == first["shards"], "as they last told"
    assert hub.asked == 2, "it is asked once and waited for"
    hub.may_answer.set()
    assert (await reader.read())["shards"][0]["pushes"] == 161
    await reader.close()


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:5556", 200), ("[::1]:5556", 200), ("[::1]", 200), ("rebound.example:5556", 421), ("", 421)],
)
def test_a_hub_of_this_machine_answers_to_its_own_names_alone(host: str, status: int) -> None:
    shut = serve(StatusHub(), {"localhost", "[::1]"})
    assert run(ask(shut, "/status.json", host=host)).status == status


async def test_a_shard_that_is_dismissed_while_it_is_asked_hides_nothing() -> None:
    async def dismissed() -> list[dict[str, Any]]:
        raise asyncio.CancelledError

    hub = StatusHub()
    told, hub.shards = hub.shards, dismissed  # type: ignore[method-assign]
    reader = StatusReader(hub.reporter)
    first = await reader.read()
    hub.shards = told  # type: ignore[method-assign]
    second = await reader.read()
    assert first["workers"] == second["workers"]
    assert (first["shards"], bool(second["shards"])) == ([], True)

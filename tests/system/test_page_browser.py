"""The status page in a real browser: live, by keyboard, without scripts, on a phone and at night."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.support.pages.served_page import EVERY_STATE, ServedPage, served_page
from tests.support.pages.status_hub import worker
from tests.support.processes.cluster import SMALL, Cluster, Program, await_all
from tests.system.browser import (
    DESK,
    NEED_CHROMIUM,
    PATIENCE_MS,
    PHONE,
    Visit,
    assert_tab_reaches_everything_once,
    new_pages,
)

SHOTS = Path(os.environ["PAGE_SHOTS"]) if "PAGE_SHOTS" in os.environ else None

pytestmark = [pytest.mark.slow, *NEED_CHROMIUM]

FIRST_MARK = """rank => {
    window.firstMark = null
    new MutationObserver(() => {
        const state = document.querySelector(`#worker-${rank} .is-silent`)
        if (state && window.firstMark === null) window.firstMark = state.textContent
    }).observe(document.body, {subtree: true, childList: true, characterData: true})
}"""


class PageSeen(Visit):
    """A visit to the status page, which may take its time."""

    def __init__(self, page: Page, address: str) -> None:
        super().__init__(page)
        page.set_default_timeout(PATIENCE_MS)
        page.goto(address)

    def shoot(self, name: str) -> None:
        """Keeps a picture of the whole page, if somebody wants to see it."""
        if SHOTS is not None:
            self.page.screenshot(path=SHOTS / f"{name}.png", full_page=True)


@pytest.fixture
def visit() -> Iterator[Callable[..., PageSeen]]:
    with new_pages() as new_page:
        yield lambda address, width=DESK, **more: PageSeen(new_page(width, **more), address)


@contextmanager
def live(visit: Callable[..., PageSeen], **state: Any) -> Iterator[tuple[Page, ServedPage]]:
    """A page that a browser has open and that follows its hub, and the hub's side of it."""
    with served_page(**state) as opened:
        page = visit(opened.address).page
        expect(page.locator("#live")).to_have_text("Live")
        yield page, opened


def served(cluster: Cluster, *flags: str) -> tuple[Program, str, str]:
    """A server, its address, and the address of its page with the token."""
    server, address = cluster.server(*flags)
    server.until_said("metrics   ")
    (file,) = re.findall(r"link with the token: (.+)\)", server.said())
    return server, address, Path(file).read_text().strip()


@pytest.mark.parametrize("view", ["", "?view=tables"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_the_page_fits_is_accessible_and_asks_nobody_else(
    visit: Callable[..., PageSeen], width: int, scheme: str, view: str
) -> None:
    with served_page(**EVERY_STATE) as opened:
        seen = visit(f"{opened.address}/{view}", width, color_scheme=scheme)
        expect(seen.page.locator("#live")).to_have_text("Live")
        seen.shoot(f"every-state-{width}-{scheme}{'-tables' if view else ''}")
        assert seen.width() == width
        assert seen.violations() == []
        assert all(url.startswith(f"{opened.address}/") for url in seen.asked), seen.asked
        assert seen.complaints == []


@pytest.mark.parametrize("topology", ["hub", "ring"])
@pytest.mark.parametrize("workers", [1, 4, 64])
def test_few_and_many_fit_into_the_picture(
    visit: Callable[..., PageSeen], workers: int, topology: str
) -> None:
    shards = 0 if topology == "ring" else {1: 1, 4: 2, 64: 12}[workers]
    with served_page(workers, shards, topology=topology) as opened:
        seen = visit(opened.address, PHONE if workers == 4 else DESK)
        expect(seen.page.locator("#live")).to_have_text("Live")
        seen.shoot(f"{topology}-{workers}")
        drawing = seen.page.locator("svg.topology").bounding_box()
        assert drawing is not None
        for node in seen.page.locator("svg.topology g").all():
            box = node.bounding_box()
            assert box is not None
            assert box["x"] >= drawing["x"] - 1
            assert box["x"] + box["width"] <= drawing["x"] + drawing["width"] + 1
        assert seen.violations() == []


def test_workers_are_seen_to_join_and_a_stopped_one_within_two_seconds(
    visit: Callable[..., PageSeen], cluster: Cluster, tmp_path: Path
) -> None:
    server, address, link = served(cluster, "--workers", "3", "--lease", "60", "--once")
    seen = visit(link)
    page, go = seen.page, tmp_path / "go"
    expect(page.locator("h1")).to_have_text("No job yet: waiting for the first worker")

    def start(rank: int) -> Program:
        script = [SMALL, "40", "16", "hold", str(go), "20"]
        return cluster.worker(address, "--rank", str(rank), *script)

    workers = [start(0), start(1)]
    expect(page.locator(".is-joined .rank")).to_have_text(["0", "1"])
    expect(page.locator("h1")).to_contain_text("waiting for 1 of 3 workers (rank 2 not started yet)")
    expect(page.locator("#node-2.is-missing")).to_have_count(1)
    workers.append(start(2))
    expect(page.locator("h1")).to_contain_text("3 workers train through the hub (bsp)")
    await_all(workers, "holding at 20")
    expect(page.locator("#log")).to_contain_text("joined")
    expect(page.locator("#worker-1 .state")).to_have_text("training")

    page.evaluate(FIRST_MARK, 1)
    workers[1].process.send_signal(signal.SIGSTOP)
    expect(page.locator("#worker-1 .state.is-silent")).to_have_count(1)
    # In seconds since its last heartbeat, which came before it was stopped, as the hub counts them.
    assert page.evaluate("() => window.firstMark").split() == ["silent", "for", "1", "s"]
    expect(page.locator("#node-1.is-silent .sign")).to_have_text("!")
    expect(page.locator(".alarm")).to_contain_text("Rank 1")
    expect(page.locator("#news")).to_contain_text("rank 1 is silent")
    seen.shoot("a-stopped-worker")
    workers[1].process.send_signal(signal.SIGCONT)
    expect(page.locator("#worker-1 .state")).to_have_text("training")

    go.touch()
    assert [each.done()["steps"] for each in workers] == [40, 40, 40]
    server.done()
    expect(page.locator("#live")).to_contain_text("the server has stopped")


def test_buttons_work_with_the_token_and_not_without(
    visit: Callable[..., PageSeen], cluster: Cluster, tmp_path: Path
) -> None:
    saved, go = tmp_path / "saved", tmp_path / "go"
    server, address, link = served(cluster, "--workers", "1", "--checkpoint-dir", str(saved), "--page-public")
    worker = cluster.worker(address, SMALL, "100000", "16", "hold", str(go), "20")
    worker.until_said("holding at 20")
    plain = visit(link.partition("#")[0]).page
    plain.get_by_role("button", name="Write a checkpoint").click()
    assert plain.evaluate("() => document.activeElement.id") == "token", "the browser asks for it"
    plain.get_by_label("Token").fill("a token that is not the one")
    plain.get_by_role("button", name="Write a checkpoint").click()
    expect(plain.locator("#answer")).to_contain_text("The token is wrong")
    assert not list(saved.glob("*/manifest*"))

    page = visit(link).page
    assert page.url == link.partition("#")[0], "the token is out of sight"
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Write a checkpoint").click()
    go.touch()  # a lockstep checkpoint is of a step to come
    expect(page.locator("#answer")).to_contain_text("is saved in")
    assert list(saved.glob("*/manifest*"))
    expect(page.locator("#log")).to_contain_text("checkpoint of step")

    page.reload()
    assert page.get_by_label("Token").input_value() in link, "as typed"
    page.get_by_role("button", name="End the job").click()
    expect(page.locator("#answer")).to_contain_text("The job ends now")
    assert "a user ended the job on the status page" in worker.done(69)["error"]
    expect(page.locator("h1")).to_contain_text("No job yet")
    page.get_by_role("button", name="End the job").click()
    expect(page.locator("#answer")).to_contain_text("Failed: cannot end the job: no job is running")

    second = cluster.worker(address, SMALL, "100000")
    expect(page.locator("h1")).to_contain_text("1 worker trains")
    page.get_by_role("button", name="Drain").click()
    expect(page.locator("#answer")).to_contain_text("then the server stops")
    second.done(75)
    server.done(0)
    expect(page.locator("#live")).to_contain_text("the server has stopped")


def test_a_dismissed_confirmation_cancels_the_action(visit: Callable[..., PageSeen]) -> None:
    with served_page() as opened:
        page = visit(opened.link).page
        page.on("dialog", lambda dialog: dialog.dismiss())
        for name in ("Drain", "End the job"):
            page.get_by_role("button", name=name).click()
        page.get_by_role("button", name="Write a checkpoint").click()
        expect(page.locator("#answer")).to_contain_text("Step 40 is saved")
        assert opened.hub.done == ["save"]


@pytest.mark.parametrize("scripts", [True, False])
def test_a_visitor_without_a_token_signs_in(visit: Callable[..., PageSeen], scripts: bool) -> None:
    with served_page(public=False, **EVERY_STATE) as opened:
        page = visit(opened.address, java_script_enabled=scripts).page
        expect(page.locator("h1")).to_have_text("Sign in")
        page.get_by_label("Token").fill("a token that is not the one")
        page.get_by_role("button", name="Sign in").click()
        expect(page.locator("main")).to_contain_text("The token is wrong")
        if scripts:
            page.goto(opened.link)
        else:
            page.get_by_label("Token").fill(opened.link.partition("#token=")[2])
            page.get_by_role("button", name="Sign in").click()
        expect(page.locator("h1")).to_contain_text("train.py")
        if scripts:
            expect(page.locator("#live")).to_have_text("Live")
            assert "token" not in page.url


def test_the_page_reads_and_acts_without_scripts(visit: Callable[..., PageSeen]) -> None:
    with served_page(**EVERY_STATE) as opened:
        seen = visit(opened.address, java_script_enabled=False)
        page = seen.page
        expect(page.locator("#worker-2 .state")).to_have_text("silent for 3 s")
        assert not page.get_by_label("Token").is_visible()
        opened.hub.told["step"] = 500
        expect(page.locator("#summary dl")).to_contain_text("500")  # it loads itself again
        page.get_by_role("link", name="Stop the automatic reload").click()
        seen.shoot("no-script")
        token = opened.link.partition("#token=")[2]
        page.get_by_label("Token").fill("a token that is not the one")
        page.get_by_role("button", name="Drain").click()
        expect(page.locator("main")).to_contain_text("The token is wrong")
        assert opened.hub.done == []
        page.go_back()
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Drain").click()
        expect(page.locator("h1")).to_have_text("Done")
        seen.shoot("no-script-answer")
        assert opened.hub.done == ["drain"]
        page.get_by_role("link", name="Back to the hub").click()
        expect(page.locator("h1")).to_contain_text("train.py")


def test_input_and_focus_survive_updates_of_the_page(visit: Callable[..., PageSeen]) -> None:
    with live(visit, **EVERY_STATE) as (page, opened):
        page.get_by_label("Token").type("half a tok")
        box = page.locator("#workers-table")
        box.focus()
        opened.hub.told["workers"] = [worker(rank, step=77) for rank in range(9)]
        expect(page.locator("#worker-5")).to_contain_text("77")  # the section was replaced as a whole
        assert page.evaluate("() => document.activeElement.id") == "workers-table"
        page.get_by_label("Token").focus()
        page.keyboard.type("en")
        opened.hub.told["workers"][5]["step"] = 78
        expect(page.locator("#worker-5")).to_contain_text("78")  # the row alone
        assert page.get_by_label("Token").input_value() == "half a token"
        assert page.evaluate("() => document.activeElement.id") == "token"


def test_tab_reaches_everything_and_shows_where_it_is(visit: Callable[..., PageSeen]) -> None:
    with live(visit, **EVERY_STATE) as (page, _):
        assert_tab_reaches_everything_once(page, 8)


def test_numbers_are_one_step_away_for_those_who_look_rather_at_them(visit: Callable[..., PageSeen]) -> None:
    with live(visit) as (page, opened):
        expect(page.locator("svg.topology")).to_be_visible()
        expect(page.locator("#course-table")).to_be_hidden()
        page.get_by_role("link", name="Tables instead of charts").click()
        expect(page.locator("svg.topology")).to_be_hidden()
        expect(page.locator("#course-table")).to_be_visible()
        opened.hub.told["step"] = 90
        expect(page.locator("#summary dl")).to_contain_text("90")  # live as well
        expect(page.locator("#course-table")).to_be_visible()


def test_a_curves_value_is_shown_under_the_pointer_and_stays_when_it_grows(
    visit: Callable[..., PageSeen],
) -> None:
    workers = [worker(0, metrics={"accuracy": 0.25})]
    with served_page(1, seconds_up=100.0, step=2000, workers=workers) as opened:
        page, told = visit(opened.address).page, opened.hub.told
        value = page.locator("#metric-0-chart").locator("xpath=..").locator(".value")
        expect(value).to_have_text("0.25")
        told |= {"seconds_up": 110.0, "step": 2100, "workers": [worker(0, metrics={"accuracy": 0.5})]}
        expect(value).to_have_text("0.5")
        page.locator("#metric-0-chart").hover(position={"x": 60, "y": 20})  # at the left end of the curve
        expect(value).to_have_text("0.25 at step 2,000")
        told |= {"seconds_up": 120.0, "step": 2200, "workers": [worker(0, metrics={"accuracy": 0.625})]}
        expect(page.locator("#metric-0-chart")).to_have_attribute("data-steps", "2000 2100 2200")
        expect(value).to_have_text("0.25 at step 2,000")
        expect(page.locator("#metric-0-chart .pointer")).to_have_count(1)
        page.locator("h1").hover()
        expect(value).to_have_text("0.625")
        expect(page.locator(".pointer")).to_have_count(0)


def test_a_server_that_went_away_is_told(visit: Callable[..., PageSeen]) -> None:
    with live(visit) as (page, opened):
        opened.close()
        expect(page.locator("#live")).to_contain_text("the server has stopped")

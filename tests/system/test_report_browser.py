"""The report in a real browser: on a phone and on a desk, by day and by night, by keyboard, on paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from hubring.workers.compare.show.page import page as made_page
from tests.support.compare.results import full, minimal, read
from tests.system.browser import (
    DESK,
    NEED_CHROMIUM,
    PHONE,
    Visit,
    assert_tab_reaches_everything_once,
    new_pages,
)

pytestmark = [pytest.mark.slow, *NEED_CHROMIUM]

OPEN_ALL = "() => document.querySelectorAll('details').forEach(each => { each.open = true })"
BEYOND = """() => [...document.querySelectorAll('svg text, .headline, h1, h2, h3, p')]
    .filter(each => each.checkVisibility())
    .map(each => [each.textContent, each.getBoundingClientRect()])
    .filter(([, box]) => box.width > 0 && (box.left < -0.5 || box.right > innerWidth + 0.5))
    .map(([text, box]) => `${text}: ${box.left} to ${box.right}`)"""


class ReportSeen(Visit):
    """A visit to a file, which gets nothing else that it asks for."""

    def __init__(self, page: Page, file: Path) -> None:
        super().__init__(page)
        self.file = file
        page.route(lambda url: url != file.as_uri(), lambda route: route.abort())
        page.goto(file.as_uri())


@pytest.fixture
def visit(tmp_path: Path) -> Iterator[Callable[..., ReportSeen]]:
    file = tmp_path / "report.html"

    def open_page(results: dict[str, Any], width: int = DESK, **more: Any) -> ReportSeen:
        file.write_text(made_page(read(results)))
        return ReportSeen(new_page(width, **more), file)

    with new_pages() as new_page:
        yield open_page


@pytest.mark.parametrize("results", [full, minimal])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_the_page_fits_is_accessible_and_asks_for_nothing(
    visit: Callable[..., ReportSeen], width: int, scheme: str, results: Callable[[], dict[str, Any]]
) -> None:
    seen = visit(results(), width, color_scheme=scheme)
    assert seen.width() == width
    seen.page.evaluate(OPEN_ALL)
    assert seen.width() == width
    assert seen.page.evaluate(BEYOND) == []
    assert seen.violations() == []
    assert seen.asked == [seen.file.as_uri()]
    assert seen.complaints == []


def test_day_and_night_differ(visit: Callable[..., ReportSeen]) -> None:
    paper = "() => getComputedStyle(document.body).backgroundColor"
    accent = "() => getComputedStyle(document.querySelector('.bar rect')).fill"
    day, night = (visit(minimal(), color_scheme=scheme).page for scheme in ("light", "dark"))
    assert day.evaluate(paper) != night.evaluate(paper)
    assert day.evaluate(accent) != night.evaluate(accent)


def test_tab_reaches_everything_once_and_shows_where_it_is(visit: Callable[..., ReportSeen]) -> None:
    page = visit(full(), reduced_motion="reduce").page
    page.evaluate(OPEN_ALL)
    assert_tab_reaches_everything_once(page, 100)


def test_the_first_tab_offers_the_way_past_and_enter_opens_numbers(visit: Callable[..., ReportSeen]) -> None:
    page = visit(full(), reduced_motion="reduce").page
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "Skip to the verdict"
    page.keyboard.press("Enter")
    assert page.evaluate("() => document.activeElement.id") == "verdict"
    numbers = page.locator("#throughput summary").first
    table = page.locator("#throughput details table").first
    assert not table.is_visible()
    numbers.focus()
    page.keyboard.press("Enter")
    assert table.is_visible()


@pytest.mark.parametrize(("wish", "way"), [("reduce", "auto"), ("no-preference", "smooth")])
def test_nothing_moves_for_those_who_wish_so(visit: Callable[..., ReportSeen], wish: str, way: str) -> None:
    page = visit(minimal(), reduced_motion=wish).page
    assert page.evaluate("() => getComputedStyle(document.documentElement).scrollBehavior") == way


def test_on_paper_it_is_black_on_white_without_links_to_click_and_with_every_drawing(
    visit: Callable[..., ReportSeen],
) -> None:
    page = visit(full(), color_scheme="dark").page
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("() => getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert not page.locator("nav").is_visible()
    drawings = "[...document.querySelectorAll('svg.chart, .bars')]"
    assert page.evaluate(f"() => {drawings}.filter(each => !each.checkVisibility()).length") == 0
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_the_report_reads_without_scripts(visit: Callable[..., ReportSeen]) -> None:
    page = visit(full(), java_script_enabled=False).page
    assert page.locator("h1").is_visible()
    assert page.locator("#accuracy svg.chart").first.is_visible()
    page.locator("#accuracy summary").first.click()
    assert page.locator("#accuracy table").first.is_visible()

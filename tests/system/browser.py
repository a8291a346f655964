"""What the tests of the status page and of the report ask of a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

from tests.support.needs import needs

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NEED_CHROMIUM = needs(CHROMIUM, "Chromium", "apt-get install chromium")
AXE = Path(__file__).parent.parent / "axe" / "axe.min.js"
PHONE, DESK = 320, 1280
PATIENCE_MS = 90_000.0
"""For what a busy machine takes its time for; nothing is measured by it."""
FOCUSABLE = """() => [...document.querySelectorAll('a[href], button, input, summary, [tabindex="0"]')]
    .filter(each => each.checkVisibility()).length"""
FOCUSED = """() => {
    const here = document.activeElement, box = here.getBoundingClientRect(), style = getComputedStyle(here)
    window.met = window.met || new Set()
    const again = window.met.has(here)
    window.met.add(here)
    const drawn = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2
    return {tag: here.tagName, id: here.id, text: here.textContent.slice(0, 60), again, drawn,
            shown: box.width > 0 && box.bottom > 0 && box.top < innerHeight}
}"""


@contextmanager
def new_pages() -> Iterator[Callable[..., Page]]:
    """Opens a browser; gives what opens a page in it, with a width and other settings."""
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield lambda width, **more: browser.new_page(viewport={"width": width, "height": 800}, **more)
        browser.close()


class Visit:
    """A page that is open, and all that it asked for and complained of."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.asked: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def violations(self) -> list[str]:
        """What axe-core finds wrong with the page as it stands."""
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
        return [f"{each['id']}: {each['nodes'][0]['failureSummary']}" for each in found["violations"]]

    def width(self) -> int:
        """How wide the page is, scrolled or not."""
        found: int = self.page.evaluate("() => document.documentElement.scrollWidth")
        return found


def assert_tab_reaches_everything_once(page: Page, least: int) -> None:
    """Also that each element shows that it has the focus, and is in sight."""
    count = page.evaluate(FOCUSABLE)
    assert count > least
    for _ in range(count):
        page.keyboard.press("Tab")
        here = page.evaluate(FOCUSED)
        assert here["drawn"], here
        assert here["shown"], here
        assert not here["again"], here

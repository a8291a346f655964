"""The page as a whole: everything is in it before any script runs."""

from __future__ import annotations

from hubring.ps.markup import Html, element
from hubring.ps.page.controls import controls
from hubring.ps.page.painter import Painting
from hubring.ps.page.sections.summary import headline

REFRESH_SECONDS = 2
"""How often a browser without JavaScript loads it again."""


def page(painting: Painting, *, tables: bool = False, still: bool = False) -> Html:
    """A whole HTML document.

    Args:
        painting: What there is to see.
        tables: Numbers instead of drawings.
        still: It does not load itself again where there is no JavaScript.
    """
    sections = {name: section.html for name, section in painting.sections.items()}
    lines = sections.pop("log")
    body = element(
        "body",
        element("a", "Skip to the workers", href="#workers", class_="skip"),
        element("main", _bar(tables, still), *sections.values(), controls(not still), lines),
        element("p", id="news", role="status", class_="heard"),
        class_="tables" if tables else None,
    )
    return Html(
        "<!doctype html>\n" + element("html", _head(headline(painting.moment), still), body, lang="en")
    )


def answer(heading: str, sentence: str) -> Html:
    """What somebody without JavaScript reads after a button."""
    words = element("p", sentence, class_="answer")
    back = element("p", element("a", "Back to the hub", href="/"))
    body = element("body", element("main", element("h1", heading), words, back))
    return Html("<!doctype html>\n" + element("html", _head(heading, still=True), body, lang="en"))


def _head(title: str, still: bool) -> Html:
    again = element("noscript", element("meta", http_equiv="refresh", content=REFRESH_SECONDS))
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{title} – Hubring"),
        element("link", rel="icon", href="/icon.svg", type="image/svg+xml"),
        element("link", rel="stylesheet", href="/page.css"),
        None if still else again,
        element("script", src="/page.js", defer=True),
    )


def _bar(tables: bool, still: bool) -> Html:
    """Which view it is, whether it is live, and the way to the other view."""
    view, words = ("", "Drawings") if tables else ("?view=tables", "Tables instead of drawings")
    return element(
        "header",
        element("p", "Hubring", class_="kicker"),
        element("p", "As of the moment it was loaded." if still else None, id="live", role="status"),
        element("nav", element("a", words, href=f"/{view}", id="view"), aria_label="Views"),
    )

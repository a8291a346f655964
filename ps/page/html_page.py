"""The complete HTML page. It has all content before any script runs."""

from __future__ import annotations

from hubring.ps.page.renderer import Rendering
from hubring.ps.page.section import TEMPLATES
from hubring.ps.page.sections.summary import headline


def page(rendering: Rendering, *, tables: bool = False, still: bool = False) -> str:
    """Returns the HTML document.

    Args:
        rendering: The content.
        tables: Whether to show tables instead of charts.
        still: Whether to disable the automatic reload of browsers without JavaScript.
    """
    title = headline(rendering.snapshot)
    return TEMPLATES.render("page.html", title=title, sections=rendering.sections, tables=tables, still=still)


def sign_in(sentence: str) -> str:
    """Returns the page that asks for the token."""
    return TEMPLATES.render("sign_in.html", title="Sign in", sentence=sentence, tables=False, still=True)


def answer(heading: str, sentence: str) -> str:
    """Returns the page that a browser without JavaScript shows after a button."""
    return TEMPLATES.render("answer.html", title=heading, sentence=sentence, tables=False, still=True)

"""The page as a whole: everything is in it before any script runs."""

from __future__ import annotations

from hubring.ps.page.renderer import Rendering
from hubring.ps.page.section import TEMPLATES
from hubring.ps.page.sections.summary import headline


def page(rendering: Rendering, *, tables: bool = False, still: bool = False) -> str:
    """A whole HTML document.

    Args:
        rendering: What there is to see.
        tables: Numbers instead of drawings.
        still: It does not load itself again where there is no JavaScript.
    """
    title = headline(rendering.snapshot)
    return TEMPLATES.render("page.html", title=title, sections=rendering.sections, tables=tables, still=still)


def answer(heading: str, sentence: str) -> str:
    """What somebody without JavaScript reads after a button."""
    return TEMPLATES.render("answer.html", title=heading, sentence=sentence, tables=False, still=True)

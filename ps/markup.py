"""HTML elements made in Python: whatever is not markup already is escaped, so nothing can get through.

element("p", "1 < 2", class_="note")   ->   <p class="note">1 &lt; 2</p>
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from html import escape

_UNIT = re.compile(r"(\d) (%|(?:[kMG]bit/s|[kMG]?B|m?s)\b)")
"""A number and its unit, which stay on one line."""

VOID = frozenset({"meta", "link", "input"})
"""Elements of our pages that hold nothing and are not closed."""


class Html(str):
    """Markup. Anything done to it as to a string gives plain text again, which would be escaped."""

    __slots__ = ()


Child = str | int | float | None
Value = str | int | float | bool | None


def element(tag: str, /, *children: Child | Iterable[Child], **attributes: Value) -> Html:
    """One element.

    Args:
        tag: Its name.
        children: What it holds; text is escaped, markup is not, None is left out.
        attributes: `class_` is written `class`, `aria_label` `aria-label`. None and False leave one out, True
            writes the name alone.
    """
    opened = f"<{tag}{''.join([_attribute(key, value) for key, value in attributes.items()])}>"
    return Html(opened if tag in VOID else f"{opened}{_joined(children)}</{tag}>")


def together(*children: Child | Iterable[Child]) -> Html:
    """Several elements or texts, one after the other."""
    return Html(_joined(children))


def verbatim(text: str) -> Html:
    """Text that somebody will copy: it is escaped and nothing else is done to it."""
    return Html(escape(text, quote=False))


def _joined(children: Iterable[Child | Iterable[Child]]) -> str:
    return "".join([child if type(child) is Html else _child(child) for child in children])


def _child(child: Child | Iterable[Child]) -> str:
    if child is None:
        return ""
    if isinstance(child, str):
        return _text(child)
    if isinstance(child, int | float):
        return str(child)
    return _joined(child)


@lru_cache(maxsize=1024)  # of a table's cells, most say what others say, or said before
def _text(text: str) -> str:
    return escape(_UNIT.sub("\\1\u00a0\\2", text), quote=False)


def _attribute(key: str, value: Value) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    return f' {name}="{escape(value) if isinstance(value, str) else _number(value)}"'


def _number(value: int | float) -> str:
    """Coordinates to a hundredth: no eye sees more, and the page stays small."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def percent(share: float) -> str:
    """A coordinate as a share of the drawing."""
    return f"{_number(100.0 * share)}%"

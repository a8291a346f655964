"""Templates and the style sheet of the kit and of one package, with the same rules for every page.

All values are escaped. A missing value raises an error. Templates are compiled once. Lines are joined as
in JSX: a line break next to a tag or a statement is removed, any other becomes a space.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.resources import files
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from jinja2.ext import Extension
from markupsafe import Markup

from hubring.ps.page.kit import figures


def style_sheet(package: str) -> str:
    """Returns the CSS for the pages of a package. The package's own part is its `page.css`."""
    parts = files(__package__) / "base.css", files(package) / "page.css"
    return "\n".join(part.read_text() for part in parts)


_BREAK = re.compile(r"\s*\n\s*")
_BREAK_AT_TAG = re.compile(r"(?:(?<=>)|(?<=[%#]}))\s*\n\s*|\s*\n\s*(?=<|{[%#]|$)")

_UNIT = re.compile(r"(\d) (%|(?:[kMG]bit/s|[kMG]?B|m?s)\b)")
"""A number and its unit; a no-break space joins them."""

_HYPHENATED = re.compile(r"(?:--)?\w+(?:-\w+)+")

_FILTERS = ("duration", "grouped", "loss", "number", "percent", "share", "size")
"""Functions of `figures` that templates can use as filters."""


class Templates:
    """The templates in the folder `templates` of a package, and those of the kit.

    Args:
        package: The package's full name.
    """

    def __init__(self, package: str) -> None:
        self._environment = Environment(
            loader=ChoiceLoader([PackageLoader(package), PackageLoader(__package__)]),
            extensions=[_Joined],
            autoescape=True,
            undefined=StrictUndefined,
            finalize=_written,
            auto_reload=False,
        )
        self._environment.filters |= {name: getattr(figures, name) for name in _FILTERS}
        self._environment.filters["whole"] = _whole

    def render(self, name: str, **values: Any) -> str:
        """Renders a whole page."""
        return self._environment.get_template(name).render(values)

    def macros(self, name: str) -> Any:
        """Returns a template's macros as functions that return `Markup`."""
        return self._environment.get_template(name).module


class _Joined(Extension):
    """Joins the lines of a template's source; does not change values."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        return _BREAK.sub(" ", _BREAK_AT_TAG.sub("", source))


def _written(value: object) -> object:
    """Returns the output for a template's value. The filter `|e` leaves spaces as they are."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, str):
        return _unbroken(value)
    return figures.coordinate(value) if isinstance(value, float) else value


def _whole(text: str) -> Markup:
    """Returns the text, in which no line ends within a hyphenated word."""
    escaped = str(_unbroken(text))
    return Markup(_HYPHENATED.sub(r'<span class="whole">\g<0></span>', escaped))  # noqa: S704 - escaped


@lru_cache(maxsize=1024)  # most cells of a table repeat the same texts
def _unbroken(text: str) -> Markup:
    return Markup.escape(_UNIT.sub("\\1\u00a0\\2", text))

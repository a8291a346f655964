"""The style sheet of a page: what all pages have, then what only this one has."""

from __future__ import annotations

from importlib.resources import files


def style(package: str) -> str:
    """CSS for the pages of a package, whose own part is its `page.css`."""
    parts = files(__package__) / "base.css", files(package) / "page.css"
    return "\n".join(part.read_text() for part in parts)

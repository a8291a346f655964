"""The style sheet of a page: the shared part, then the page's own part."""

from __future__ import annotations

from importlib.resources import files


def style(package: str) -> str:
    """Returns the CSS for the pages of a package. The package's own part is its `page.css`."""
    parts = files(__package__) / "base.css", files(package) / "page.css"
    return "\n".join(part.read_text() for part in parts)

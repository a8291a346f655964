"""A cache of markup: renders a piece of the page only if its values have changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVarTuple, Unpack

from markupsafe import Markup

Shown = TypeVarTuple("Shown")


class MarkupCache:
    """Pieces of a page by name. A piece that is not used in a turn is dropped.

    Attributes:
        made: How many pieces were rendered so far.
    """

    def __init__(self) -> None:
        self.made = 0
        self._before: dict[str, tuple[object, Markup]] = {}
        self._now: dict[str, tuple[object, Markup]] = {}

    def turn(self) -> None:
        """Begins a new rendering of the page."""
        self._before, self._now = self._now, {}

    def __call__(self, name: str, make: Callable[[Unpack[Shown]], Markup], *shown: *Shown) -> Markup:
        """Returns the piece `name`, which is `make(*shown)`."""
        known = self._before.get(name)
        if known is None or known[0] != shown:
            self.made += 1
            known = (shown, make(*shown))
        self._now[name] = known
        return known[1]

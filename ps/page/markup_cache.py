"""Markup that is made anew only where what it shows has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVarTuple, Unpack

from markupsafe import Markup

Shown = TypeVarTuple("Shown")


class MarkupCache:
    """Pieces of a page by name; what a whole turn did not ask for is forgotten.

    Attributes:
        made: How many pieces were made so far.
    """

    def __init__(self) -> None:
        self.made = 0
        self._before: dict[str, tuple[object, Markup]] = {}
        self._now: dict[str, tuple[object, Markup]] = {}

    def turn(self) -> None:
        """The page is made once more."""
        self._before, self._now = self._now, {}

    def __call__(self, name: str, make: Callable[[Unpack[Shown]], Markup], *shown: *Shown) -> Markup:
        """The piece `name`: `make` of what it shows."""
        known = self._before.get(name)
        if known is None or known[0] != shown:
            self.made += 1
            known = (shown, make(*shown))
        self._now[name] = known
        return known[1]

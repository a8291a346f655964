"""Memo: markup that is made anew only where what it shows has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from ps.markup import Html

P = ParamSpec("P")


class Memo:
    """Pieces of a page by name; what a whole turn did not ask for is forgotten.

    Attributes:
        made: How many pieces were made so far.
    """

    def __init__(self) -> None:
        self.made = 0
        self._before: dict[str, tuple[object, Html]] = {}
        self._now: dict[str, tuple[object, Html]] = {}

    def turn(self) -> None:
        """The page is made once more."""
        self._before, self._now = self._now, {}

    def __call__(self, name: str, make: Callable[P, Html], *shown: P.args, **more: P.kwargs) -> Html:
        """The piece `name`: `make` of what it shows."""
        subject = (shown, more)
        known = self._before.get(name)
        if known is None or known[0] != subject:
            self.made += 1
            known = (subject, make(*shown, **more))
        self._now[name] = known
        return known[1]

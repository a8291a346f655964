"""All comparisons of a report, and how sure each must be so that the whole report rarely errs.

A report with twenty comparisons at 5 % each names a false winner in most reports. Holm's method keeps
that probability at 5 % for the whole report: the smallest probability of chance is compared with 5 % / n, the
next with 5 % / (n - 1), and so on until one fails (Holm, Scandinavian Journal of Statistics, 1979).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from hubring.workers.compare.result.ratio import CHANCE

T = TypeVar("T")


class Family:
    """The probabilities of chance of the comparisons that a report makes."""

    def __init__(self) -> None:
        self._chances: dict[Hashable, float] = {}

    def level(self, comparison: Hashable, chance: float) -> float:
        """Adds a comparison; returns the probability of chance at or below which it is decided."""
        self._chances[comparison] = chance
        return self.threshold

    @property
    def threshold(self) -> float:
        """The probability of chance at or below which each of the comparisons so far is decided."""
        ordered = sorted(self._chances.values())
        threshold = CHANCE / max(1, len(ordered))
        for rank, chance in enumerate(ordered):
            step = CHANCE / (len(ordered) - rank)
            if chance > step:
                break
            threshold = step
        return threshold

    def settle(self, say: Callable[[], T]) -> T:
        """Returns what `say` says once it makes no comparison that it did not make before.

        What one comparison decides can lead to another one, which lowers the threshold of all.
        """
        while True:
            known = len(self._chances)
            said = say()
            if len(self._chances) == known:
                return said

"""Scales: map values to positions on an axis, and choose the ticks.

`place` returns a value's position as a fraction of the axis, below 0 or above 1 outside. `ticks` returns
about five round values within the axis, rising. `label` formats a tick.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hubring.ps.page.kit.figures import digits

MOST = 6.25
"""Largest number of steps between the ends of a scale."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear scale."""

    low: float
    high: float
    step: float
    """The distance between two ticks."""

    @staticmethod
    def around(values: Iterable[float], zero: bool = False, most: float = MOST) -> Linear:
        """Returns a scale that contains the values and has round ends.

        Args:
            values: The values.
            zero: Whether the scale must include 0.
            most: Largest number of steps that the values span.
        """
        known = [*values, *([0.0] if zero else [])] or [0.0]
        low, high = min(known), max(known)
        step = _round_step((high - low or abs(high) or 1.0) / most)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        low, high = first * step, max(last, first + 1) * step
        return Linear(low, high, max(step, _round_step((high - low) / MOST)))

    def place(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        return [index * self.step for index in range(first, last + 1)]

    def label(self, tick: float) -> str:
        return _short(tick, max(abs(self.low), abs(self.high)))


@dataclass(frozen=True, slots=True)
class Log:
    """A logarithmic scale; values must be above 0."""

    low: float
    high: float
    only: tuple[float, ...] = ()
    """Fixed ticks; empty to choose round values."""

    @staticmethod
    def around(values: Iterable[float]) -> Log:
        """Returns a scale that contains the values above 0, with a small margin on both sides."""
        known = [value for value in values if value > 0] or [1.0]
        room = max(1.06, (max(known) / min(known)) ** 0.04)
        return Log(min(known) / room, max(known) * room)

    @staticmethod
    def of(values: Iterable[float]) -> Log:
        """Returns a scale with ticks at these values."""
        scale, only = Log.around(known := sorted(set(values))), tuple(known)
        return Log(scale.low, scale.high, only)

    def place(self, value: float) -> float:
        return math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[float]:
        if self.only:
            return list(self.only[:: math.ceil(len(self.only) / 6)])
        tens = [10.0**power for power in _powers(self.low, self.high)]
        for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
            found = [at for ten in tens for step in steps if self.low <= (at := ten * step) <= self.high]
            if len(found) > 2:
                return found[:: math.ceil(len(found) / 6)]
        return Linear(self.low, self.high, _round_step((self.high - self.low) / MOST)).ticks()

    def label(self, tick: float) -> str:
        return _short(tick, tick)


Scale = Linear | Log


def _powers(low: float, high: float) -> range:
    return range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)


def _round_step(least: float) -> float:
    """Returns the smallest of 1, 2 and 5 times a power of ten that is at least `least`."""
    ten = 10.0 ** math.floor(math.log10(least))
    return next(ten * digit for digit in (1, 2, 5, 10) if ten * digit >= least)


def _short(value: float, largest: float) -> str:
    """Formats a round value briefly, in the unit that fits the largest value of the axis."""
    for unit, scale, least in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e4)):
        if largest >= least and value:
            return f"{value / scale:g}{unit}"
    return f"{value:,.6g}" if abs(value) >= 1e-4 or value == 0 else digits(value, 2)

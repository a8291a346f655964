"""The data of charts, which `chart.html` draws: scales, ticks, paths and bins.

A scale maps values to positions on an axis. `place` returns a value's position as a fraction of the axis,
below 0 or above 1 outside.

A chart fills the available width, with text of a fixed size. x is a fraction of the width, y of a fixed
height. Labels are in the margins, which are the SVG's padding. SVG paths cannot use fractions, so paths
are in an inner SVG of 1000 by 1000 that is stretched, with strokes of a fixed width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hubring.ps.page.kit.figures import digits

MOST_TICKS = 6.25
"""Largest number of steps between the ends of a scale."""


@dataclass(frozen=True, slots=True)
class LinearScale:
    """A linear scale."""

    low: float
    high: float
    step: float
    """The distance between two ticks."""

    @staticmethod
    def around(values: Iterable[float], zero: bool = False, most: float = MOST_TICKS) -> LinearScale:
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
        return LinearScale(low, high, max(step, _round_step((high - low) / MOST_TICKS)))

    def place(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        return [index * self.step for index in range(first, last + 1)]

    def label(self, tick: float) -> str:
        return _short(tick, max(abs(self.low), abs(self.high)))


@dataclass(frozen=True, slots=True)
class LogScale:
    """A logarithmic scale; values must be above 0."""

    low: float
    high: float
    only: tuple[float, ...] = ()
    """Fixed ticks; empty to choose round values."""

    @staticmethod
    def around(values: Iterable[float]) -> LogScale:
        """Returns a scale that contains the values above 0, with a small margin on both sides."""
        known = [value for value in values if value > 0] or [1.0]
        room = max(1.06, (max(known) / min(known)) ** 0.04)
        return LogScale(min(known) / room, max(known) * room)

    @staticmethod
    def of(values: Iterable[float]) -> LogScale:
        """Returns a scale with ticks at these values."""
        scale, only = LogScale.around(known := sorted(set(values))), tuple(known)
        return LogScale(scale.low, scale.high, only)

    def place(self, value: float) -> float:
        return math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[float]:
        if self.only:
            return list(self.only[:: math.ceil(len(self.only) / 6)])
        low, high = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        tens = [10.0**power for power in range(low, high + 1)]
        for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
            found = [at for ten in tens for step in steps if self.low <= (at := ten * step) <= self.high]
            if len(found) > 2:
                return found[:: math.ceil(len(found) / 6)]
        return LinearScale(self.low, self.high, _round_step((self.high - self.low) / MOST_TICKS)).ticks()

    def label(self, tick: float) -> str:
        return _short(tick, tick)


Scale = LinearScale | LogScale


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


class Tick(NamedTuple):
    """A position on an axis, as a fraction of its length, and its label."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a chart.

    Attributes:
        scale: Maps values to positions.
        title: The quantity, with its unit.
        write: Formats a tick instead of the scale's own labels.
    """

    scale: Scale
    title: str = ""
    write: Callable[[float], str] | None = None

    @property
    def ticks(self) -> list[Tick]:
        """The ticks within the chart."""
        write, places = self.write or self.scale.label, self.scale.ticks()
        known = [Tick(self.scale.place(value), write(value)) for value in places]
        return [tick for tick in known if -1e-6 <= tick.at <= 1 + 1e-6]


def path(points: Iterable[tuple[float, float]], close: bool = False) -> str:
    """Returns an SVG path for `stretched`. Points are fractions of width and height, with y upwards."""
    drawn = "L".join(f"{1000 * x:.1f} {1000 * (1 - y):.1f}" for x, y in points)
    return f"M{drawn}{'z' if close else ''}"


class Bin(NamedTuple):
    """A bin of the whole numbers from `first` to `last`, and how often they occur."""

    first: int
    last: int
    times: int

    @property
    def label(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}–{self.last}"


MOST_BINS = 16


def bins(counts: Mapping[int, int]) -> tuple[Bin, ...]:
    """Returns at most 16 bins of equal width, from 0 on; none if there are no counts."""
    if not counts:
        return ()
    top = max(counts)
    width = -(-(top + 1) // MOST_BINS)
    return tuple(
        Bin(low, low + width - 1, sum(counts.get(n, 0) for n in range(low, low + width)))
        for low in range(0, top + 1, width)
    )

"""The layout of workers and shards in the topology chart.

A ring's workers are on a circle. A hub's workers are on an arc above a row of shards. The row lies between
the tangents at the arc's ends, so no link crosses another worker or shard.
"""

from __future__ import annotations

import math
from typing import NamedTuple

SIDE = 400
"""The chart's width and height; the browser scales it to its box."""

MIDDLE = SIDE / 2
RIM = 158
"""Radius of the circle of workers."""

ARC = 0.65 * math.pi
"""Angle of the arc of a hub's workers."""

ARC_MIDDLE = 205.0
"""Distance of the arc's centre from the top."""

LARGEST, SMALLEST = 20.0, 2.0
"""Limits on the radius of a worker."""

ROW_TOP, ROW_HEIGHT = 324.0, 60.0
"""The row of shards: distance from the top, and height."""

WIDEST, GAP = 104.0, 8.0
"""Limits on the width of a shard, and on the gap to the next one."""


class Point(NamedTuple):
    """Distances from the left and from the top."""

    x: float
    y: float

    def __str__(self) -> str:
        return f"{self.x:.1f} {self.y:.1f}"


def on_circle(index: float, count: int, radius: float) -> Point:
    """Returns the position of one of `count` items, clockwise from the top."""
    angle = 2 * math.pi * index / count - math.pi / 2
    return Point(MIDDLE + radius * math.cos(angle), MIDDLE + radius * math.sin(angle))


def on_arc(index: int, count: int, radius: float) -> Point:
    """Returns the position of one of `count` items on the arc, from left to right."""
    angle = ARC * ((index + 0.5) / count - 0.5) - math.pi / 2
    return Point(MIDDLE + radius * math.cos(angle), ARC_MIDDLE + radius * math.sin(angle))


def worker_radius(count: int, angle: float = 2 * math.pi) -> float:
    """Returns the radius with which `count` workers fit on `angle` of the circle."""
    return max(SMALLEST, min(LARGEST, 0.35 * angle * RIM / count))


class Box(NamedTuple):
    """The place of a shard."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> Point:
        return Point(self.x + self.width / 2, self.y + self.height / 2)

    @property
    def top(self) -> Point:
        """Where links end."""
        return Point(self.x + self.width / 2, self.y)


def shard_boxes(count: int) -> tuple[Box, ...]:
    """Returns the boxes of `count` shards in the row."""
    apart = min(WIDEST + GAP, SIDE / max(1, count))
    width = apart - min(GAP, apart / 4)
    left = MIDDLE - count * apart / 2 + (apart - width) / 2
    return tuple(Box(left + index * apart, ROW_TOP, width, ROW_HEIGHT) for index in range(count))

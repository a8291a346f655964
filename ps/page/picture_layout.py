"""The layout of workers and shards in the topology chart."""

from __future__ import annotations

import math
from typing import NamedTuple

SIDE = 400
"""The chart's width and height; the browser scales it to its box."""

MIDDLE = SIDE / 2
RIM = 158
"""Radius of the circle of workers."""

LARGEST, SMALLEST = 20.0, 2.0
"""Limits on the radius of a worker."""


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


def worker_radius(count: int) -> float:
    """Returns the radius with which `count` workers fit on the circle."""
    return max(SMALLEST, min(LARGEST, 0.35 * 2 * math.pi * RIM / count))


class Box(NamedTuple):
    """The size of a shard, and its distance from the middle."""

    width: float
    height: float
    away: float


def shard_box(count: int) -> Box:
    """Returns the box with which `count` shards fit inside the circle. Up to 4 boxes can show traffic."""
    if count == 1:
        return Box(104, 60, 0)
    if count <= 4:
        return Box(78, 52, 56)
    away = 86
    width = min(40.0, 0.8 * 2 * math.pi * away / count)
    return Box(width, min(24.0, width), away)

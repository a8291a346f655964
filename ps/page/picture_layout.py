"""Where workers and shards stand in the picture of a topology."""

from __future__ import annotations

import math
from typing import NamedTuple

SIDE = 400
"""The picture's width and height; it is scaled to its box."""

MIDDLE = SIDE / 2
RIM = 158
"""Radius of the circle on which the workers stand."""

LARGEST, SMALLEST = 20.0, 2.0
"""Radius of a worker, as many as there may be."""


class Point(NamedTuple):
    """From the left, and from the top."""

    x: float
    y: float

    def __str__(self) -> str:
        return f"{self.x:.1f} {self.y:.1f}"


def on_circle(index: float, count: int, radius: float) -> Point:
    """The place of one of `count`, clockwise; the first stands at the top."""
    angle = 2 * math.pi * index / count - math.pi / 2
    return Point(MIDDLE + radius * math.cos(angle), MIDDLE + radius * math.sin(angle))


def worker_radius(count: int) -> float:
    """So that so many workers fit onto the circle."""
    return max(SMALLEST, min(LARGEST, 0.35 * 2 * math.pi * RIM / count))


class Box(NamedTuple):
    """How large every shard is drawn, and how far from the middle."""

    width: float
    height: float
    away: float


def shard_box(count: int) -> Box:
    """So that so many shards fit inside; few of them have room for what goes through them."""
    if count == 1:
        return Box(104, 60, 0)
    if count <= 4:
        return Box(78, 52, 56)
    away = 86
    width = min(40.0, 0.8 * 2 * math.pi * away / count)
    return Box(width, min(24.0, width), away)

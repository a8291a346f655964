"""What latency adds to a ring over Gloo."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hubring.workers.compare.cost.model.formulas import Task

SEGMENTS, SEGMENT_BYTES = 2, 1 << 20
"""Segments into which Gloo cuts a rank's piece of an allreduce: at least so many, of at most so many bytes.
Two are on their way at once."""


class Rounds(NamedTuple):
    """Round trips of a ring.

    Attributes:
        added: What they add to the time of bytes.
        seconds: All of them with the segments that they wait for, if that is longer than all bytes; else 0.
    """

    added: float
    seconds: float


def rounds(task: Task, passes: int, most: int, workers: int, alpha: float, a_byte: float) -> Rounds:
    """Returns the round trips of passes around a ring, as if the whole model were one group.

    With several groups each has its own round trips, and backward hides those of all but the last.

    Gloo sends a segment once its receiver has said that it waits, so a segment takes a round trip and its
    time on the link. While one travels, another is sent. So two segments take twice their time on the link,
    or else a round trip and the time of one. Each pass starts again. Between two ranks, what one says waits
    behind its other segment in the same connection, so nothing hides a round trip. While an emulated link
    waits, its bucket fills, so that segments pass at once.

    Args:
        task: With the link.
        passes: Passes of the model.
        most: Most bytes of a segment.
        workers: Number of ranks.
        alpha: Seconds of a hop of a small message on one machine, with its announcement.
        a_byte: Seconds of a byte on a host's link.
    """
    if workers == 1 or not passes:
        return Rounds(0.0, 0.0)
    # Simulated rings of 2 to 16 ranks are late by a third of the jitter at each hop.
    round_trip = alpha + 2 * task.latency + task.jitter / 3
    piece = task.moved / workers
    segments = max(SEGMENTS, ceil(piece / most))
    turns = (workers - 1) * segments / 2
    passing = max(0.0, piece / segments * a_byte - task.burst)
    moving = passes * (workers - 1) * piece * a_byte
    whole = passes * (turns * (round_trip + passing) + passing)
    stalls = passes * (turns if workers == 2 else 1)
    # `Way.through` subtracts one burst, as if the bucket filled only before the first pass.
    stalled = round_trip + (stalls - 1) * max(0.0, round_trip - task.burst)
    waiting = whole - moving + min(task.burst, moving)
    return Rounds(max(stalled, waiting), whole if whole > moving else 0.0)


def down(task: Task, levels: int, alpha: float) -> float:
    """Returns the latency of a broadcast down a tree, whose receivers all say at once that they wait."""
    return levels * (alpha + task.latency) + task.latency if levels else 0.0

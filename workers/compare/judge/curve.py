"""Curves: loss and metric over one run."""

from __future__ import annotations

import math
from statistics import fmean

from msgspec.structs import astuple, replace

from hubring.workers.compare.judge.measure import began, seen, steps_of
from hubring.workers.compare.result.findings import Curve, Point
from hubring.workers.compare.run.outcome import Outcome

MOST = 400
"""Most points of a curve; more than a screen shows."""


def curve(outcome: Outcome, setting: str, metric: str) -> Curve:
    """Returns the curves of one run in the setting with this key.

    `loss` is the mean training loss of all ranks per step; above `MOST` points, neighbours are averaged.
    `metric` is rank 0's. Samples are those of all workers up to then
    (`hubring.workers.compare.judge.measure`). Points before second 0 are drawn at 0.
    """
    zero, first = began(outcome), outcome.records[0]
    points = [
        (line, Point(round(max(0.0, line["seconds"] - zero), 6), float(samples), math.nan))
        for line, samples in zip(first, seen(outcome), strict=True)
    ]
    # After a lost worker, ranks have different numbers of steps.
    together = zip(*(steps_of(record) for record in outcome.records), strict=False)
    steps = zip((point for line, point in points if "samples" in line), together, strict=False)
    losses = [
        replace(point, value=fmean(line["loss"] for line in ranks))
        for point, ranks in steps
        if all("loss" in line for line in ranks)
    ]
    return Curve(
        setting=setting,
        row=outcome.run.row.name,
        seed=outcome.run.seed,
        loss=thinned(losses),
        metric=[replace(point, value=line[metric]) for line, point in points if metric in line],
    )


def thinned(points: list[Point]) -> list[Point]:
    """Returns at most `MOST` points, each the mean of neighbours."""
    size = -(-len(points) // MOST)
    if size <= 1:
        return points
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [Point(*map(fmean, zip(*map(astuple, part), strict=True))) for part in parts]

"""Curves: how loss and measure fell or rose in one run."""

from __future__ import annotations

import math
from statistics import fmean

from msgspec.structs import astuple, replace

from hubring.workers.compare.judge.measure import began, seen, steps_of
from hubring.workers.compare.result.findings import Curve, Point
from hubring.workers.compare.run.outcome import Outcome

MOST = 400
"""Points that a curve keeps: more than a screen shows."""


def curve(outcome: Outcome, setting: str, metric: str) -> Curve:
    """How one run went, drawn in the setting of this key.

    `loss` is the mean over ranks of each step's training loss, neighbours averaged where there are more
    than `MOST`; `metric` is rank 0's measure. Samples are those of all workers by then
    (`hubring.workers.compare.judge.measure`); what comes before the zero of all seconds is drawn there.
    """
    zero, first = began(outcome), outcome.records[0]
    points = [
        (line, Point(round(max(0.0, line["seconds"] - zero), 6), float(samples), math.nan))
        for line, samples in zip(first, seen(outcome), strict=True)
    ]
    # Ranks may have taken different numbers of steps where one was lost on the way.
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
    """At most `MOST` points, each the mean of some neighbours."""
    size = -(-len(points) // MOST)
    if size <= 1:
        return points
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [Point(*map(fmean, zip(*map(astuple, part), strict=True))) for part in parts]

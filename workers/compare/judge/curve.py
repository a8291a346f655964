"""Curves: how loss and measure fell or rose in one run."""

from __future__ import annotations

from statistics import fmean

from hubring.workers.compare.judge.measure import began, seen, steps_of
from hubring.workers.compare.run.outcome import Outcome

Point = dict[str, float]
"""`seconds`, `samples` and `value`."""

MOST = 400
"""Points that a curve keeps: more than a screen shows."""


def curves(outcome: Outcome, metric: str) -> dict[str, list[Point]]:
    """A run's curves.

    `loss` is the mean over ranks of each step's training loss, neighbours averaged where there are more
    than `MOST`; `metric` is rank 0's measure. Samples are those of all workers by then
    (`hubring.workers.compare.judge.measure`); what comes before the zero of all seconds is drawn there.
    """
    zero, first = began(outcome), outcome.records[0]
    points = [
        (line, {"seconds": round(max(0.0, line["seconds"] - zero), 6), "samples": float(samples)})
        for line, samples in zip(first, seen(outcome), strict=True)
    ]
    # Ranks may have taken different numbers of steps where one was lost on the way.
    together = zip(*(steps_of(record) for record in outcome.records), strict=False)
    steps = zip((point for line, point in points if "samples" in line), together, strict=False)
    losses = [
        {**point, "value": fmean(line["loss"] for line in ranks)}
        for point, ranks in steps
        if all("loss" in line for line in ranks)
    ]
    return {
        "loss": thinned(losses),
        "metric": [{**point, "value": line[metric]} for line, point in points if metric in line],
    }


def thinned(points: list[Point]) -> list[Point]:
    """At most `MOST` points, each the mean of some neighbours."""
    size = -(-len(points) // MOST)
    if size <= 1:
        return points
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [{name: fmean(point[name] for point in part) for name in part[0]} for part in parts]

"""Unevenness: where a row's mean step is not its median one, which a table of both must say."""

from __future__ import annotations

from collections.abc import Iterable

from workers.compare.figures import digits
from workers.compare.findings import Entry, Findings
from workers.compare.scope import listed

APART = 0.15
"""How far the mean may lie from the median, relative to that, before it is worth a sentence."""


def uneven(findings: Findings) -> list[str]:
    """A sentence on the rows with a few steps far above the median, and one on those with some far below."""
    apart = [(each, off) for each in findings.rows if (off := _apart(each)) is not None]
    above = [_mean(findings, each) for each, off in apart if off > APART]
    below = [_mean(findings, each) for each, off in apart if off < -APART]
    return [*_said(above, "a few take much longer"), *_said(below, "some take much less")]


def _apart(entry: Entry) -> float | None:
    """How far the mean step is above the median one, relative to that."""
    mean, middle = entry.median("step_mean_ms"), entry.median("step_ms")
    return mean / middle - 1 if mean is not None and middle else None


def _mean(findings: Findings, entry: Entry) -> str:
    where = f"{entry.setting} " if len(findings.setting_keys) > 1 else ""
    return f"{digits(entry.median('step_mean_ms') or 0.0)} ms ({where}{entry.row})"


def _said(means: Iterable[str], why: str) -> list[str]:
    told = list(means)
    return [f"Steps take {listed(told)} on average: {why} than the median."] if told else []

"""Unevenness: where a row's mean step is not its median one, which a table of both must say."""

from __future__ import annotations

from collections.abc import Sequence

from hubring.ps.page.kit.figures import digits
from hubring.workers.compare.result.findings import Findings
from hubring.workers.compare.result.setting_text import listed

APART = 0.15
"""How far the mean may lie from the median, relative to that, before it is worth a sentence."""


def uneven(findings: Findings) -> list[str]:
    """A sentence on the rows whose mean step is far above the median one, and one on those far below."""
    above, below = list[str](), list[str]()
    for each in findings.rows:
        mean, middle = each.median("step_mean_ms"), each.median("step_ms")
        if mean is None or not middle or abs(mean / middle - 1) <= APART:
            continue
        where = f"{each.setting} " if len(findings.setting_keys) > 1 else ""
        (above if mean > middle else below).append(f"{digits(mean)} ms ({where}{each.row})")
    return [*_said(above, "some are much longer"), *_said(below, "some are much shorter")]


def _said(means: Sequence[str], why: str) -> list[str]:
    return [f"Steps take {listed(means)} on average: {why} than the median."] if means else []

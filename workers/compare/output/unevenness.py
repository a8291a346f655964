"""Unevenness: rows whose mean step time differs from the median, which tables must mention."""

from __future__ import annotations

from collections.abc import Sequence

from hubring.ps.page.kit.figures import digits
from hubring.workers.compare.result.findings import Findings
from hubring.workers.compare.result.setting_text import listed

APART = 0.15
"""Relative distance of the mean from the median that is worth a note."""


def uneven(findings: Findings) -> list[str]:
    """Returns a note on rows whose mean step is far above the median, and one on rows far below."""
    above, below = list[str](), list[str]()
    for each in findings.rows:
        mean, middle = each.median("step_mean_ms"), each.median("step_ms")
        if mean is None or not middle or abs(mean / middle - 1) <= APART:
            continue
        where = f"{each.setting} " if len(findings.setting_keys) > 1 else ""
        (above if mean > middle else below).append(f"{digits(mean)} ms ({where}{each.row})")
    return [*_note(above, "some steps are much longer"), *_note(below, "some steps are much shorter")]


def _note(means: Sequence[str], why: str) -> list[str]:
    return [f"The mean step takes {listed(means)}: {why} than the median."] if means else []

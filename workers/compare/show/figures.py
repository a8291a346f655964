"""Numbers as text, the same on the terminal and on the page: titles, units and notes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hubring.ps.page.kit.figures import NOTHING, digits
from hubring.workers.compare.findings import Bandwidth, Findings, Gate
from hubring.workers.compare.plan.setting import listed
from hubring.workers.compare.statistics import Number
from hubring.workers.peers.nccl_tests import NCCL_COLUMNS

PART = "(2/3): only 2 of 3 seeds have a value, and the median and its interval are of those seeds."
"""What such a mark at a number means."""


def partial(numbers: Iterable[Number | None]) -> str:
    """Returns `PART` if a number has no value for some seeds; empty if none is like that."""
    return "" if all(number is None or number.complete for number in numbers) else PART


def drift(gate: Gate) -> str:
    """Returns a sentence with every row's largest difference; empty if nothing was compared at the end.

    Rows can have different references, for example if the first one diverged with some seed.
    """
    agreed = [pair for pair in gate.pairs if pair.limit and pair.steps and pair.passed and not pair.advice]
    worst: dict[str, dict[str, float]] = {}
    for pair in agreed:
        rows = worst.setdefault(pair.first, {})
        both = rows.get(pair.second, 0.0), float(pair.final)
        rows[pair.second] = math.nan if any(map(math.isnan, both)) else max(both)
    if not worst:
        return ""
    found = "; ".join(
        f"from {reference}: {', '.join(f'{name} {apart:.2g}' for name, apart in rows.items())}"
        for reference, rows in worst.items()
    )
    return (
        f"End drift, the largest differences after the last step, {found}. After {agreed[0].steps} steps rows"
        " must agree; later, training amplifies rounding."
    )


def record_share(findings: Findings) -> str:
    """Returns a sentence with the smallest and the largest share of any row; empty if it was not measured."""
    known = ((row.row, row.median("record_ms"), row.median("step_mean_ms")) for row in findings.rows)
    shares = [(record / step, name) for name, record, step in known if record is not None and step]
    if not shares:
        return ""
    ends = dict.fromkeys(f"{share:.1%} ({name})" for share, name in (min(shares), max(shares)))
    found = " to ".join(ends)
    return f"The gate's own record takes {found} of a step. It is part of all times above."


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


HEADS = ("row", *NCCL_COLUMNS)
"""Heads of the terminal's table."""

SENTENCES = (
    "time: one exchange of the whole model, exposed plus hidden, including the wait for slower workers.",
    "busbw: algbw times 2(n-1)/n, the rate on each link of a ring; the links of a hub carry other amounts.",
    "#wrong: parameter elements that exceed the gate's tolerance; a dash: none were compared.",
)


def exchanges(findings: Findings, setting: str) -> list[list[str]]:
    """Returns the cells of a setting's rows, in the order of `HEADS`."""
    slept = {each.row for each in findings.under(setting) if each.emulated}
    return [
        [f"{each.row} (emulated)" if each.row in slept else each.row, *cells(each)]
        for each in findings.bandwidth
        if each.setting == setting
    ]


def cells(line: Bandwidth) -> list[str]:
    """Returns cells in the order of `COLUMNS`; a withheld time reads `withheld`."""
    shape = [f"{line.size:,}", f"{line.count:,}", line.type, line.redop]
    times = ["withheld" if value is None else digits(value) for value in (line.time, line.algbw, line.busbw)]
    return [*shape, *times, NOTHING if line.wrong is None else f"{line.wrong:,}"]

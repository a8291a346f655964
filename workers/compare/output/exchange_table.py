"""The exchange table in the columns of nccl-tests, as text for the terminal and the page."""

from __future__ import annotations

from hubring.ps.page.kit.figures import NOTHING, digits
from hubring.workers.compare.result.findings import Bandwidth, Findings
from hubring.workers.compare.result.nccl_tests import COLUMNS

HEADS = ("row", *COLUMNS)
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
    times = [_time(value) for value in (line.time, line.algbw, line.busbw)]
    return [*shape, *times, NOTHING if line.wrong is None else f"{line.wrong:,}"]


def _time(value: float | None) -> str:
    return "withheld" if value is None else digits(value)

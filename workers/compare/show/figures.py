"""Numbers as text, the same on the terminal and on the page: titles, units and notes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from hubring.ps.page.kit.figures import NOTHING, digits
from hubring.workers.compare.decide.decision import lost, script_changes
from hubring.workers.compare.decide.ratio import EVEN, FEWEST
from hubring.workers.compare.findings import Bandwidth, Findings, Gate
from hubring.workers.compare.plan.row import EVERY
from hubring.workers.compare.plan.setting import listed
from hubring.workers.compare.statistics import MeasurementNoise, Number
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
        " must agree; later, training amplifies rounding, in all rows about as much."
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
    "busbw: algbw times 2(n-1)/n, the rate on each link of a ring; of a hub, or with --local, they carry"
    " other amounts.",
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


def trust(findings: Findings) -> str:
    """Returns whether to trust the answer, and why: what speaks against it first."""
    noise, gate, gone, changed = findings.noise, findings.gate, lost(findings), script_changes(findings)
    shut = {each.row: each.withheld for each in findings.rows if each.withheld}
    # The second run of a row has another name, which is not that of a row.
    same = {name: None for pair in gate.pairs if not pair.advice for name in (pair.first, pair.second)}
    rows = [name for name in same if name in EVERY.keys() - shut.keys() - gone.keys()]
    doubts = {
        **{f"{why.rstrip('.')}.": True for why in (*gone.values(), changed) if why},
        "Rows that should compute the same do not: see Gate.": not gate.agree,
        f"Some of {gate.taken:,} steps were wrong: see Gate.": not gate.right,
        f"No speed is shown for {listed(list(shut))}: {next(iter(shut.values()), '')}.": shut and gate.passed,
        f"{noise.summary} Repeat the experiment on a quiet machine.": not noise.quiet,
        "Fewer than three seeds decide nothing.": findings.seeds < FEWEST,
        "Next: fix the row, whose logs are in runs beside the report, or leave it out with --rows, and run"
        " again.": gone or (shut and gate.passed),
    }
    right = gate.judged and gate.right
    differ = f"{gate.excused} pair{'s differ' if gate.excused > 1 else ' differs'} by right: see Gate."
    grounds = {
        f"{listed(rows)} computed the same, as they should.": gate.agree and rows[1:],
        differ: gate.agree and gate.excused,
        f"{gate.judged:,} of {gate.taken:,} updates were repeated in one process, and none was wrong.": right,
        noise.summary: noise.quiet,
        _repeat(noise): noise.repeat,
    }
    said = [text for text, holds in (*doubts.items(), *grounds.items()) if holds]
    return " ".join([f"Can you trust this? {'Not yet' if any(doubts.values()) else 'Yes'}.", *said])


def _repeat(noise: MeasurementNoise) -> str:
    """Returns by how much a row that ran twice differed from itself."""
    if noise.repeat is None:
        return ""
    # The geometric mean of ratios, each of which counts as the larger of itself and its inverse.
    apart = math.exp(fmean(abs(math.log(each)) for each in noise.repeat.ratios)) - 1
    runs = f"Run twice with each seed, {noise.repeat.row} differed from itself by {apart:.1%} on average"
    why = "as these repeats scatter, " if noise.floor > EVEN else ""
    return f"{runs}; {why}differences below {max(EVEN, noise.floor) - 1:.1%} do not count."

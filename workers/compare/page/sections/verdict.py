"""The first screen: the answer in one sentence, one chart, and a table of three columns."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from statistics import fmean
from typing import Any

from hubring.ps.page.kit.figures import NOTHING
from hubring.workers.compare.page.figure import Table
from hubring.workers.compare.page.material import Material
from hubring.workers.compare.page.sections.throughput import bar, reach
from hubring.workers.compare.result.findings import Entry, Findings
from hubring.workers.compare.result.ratio import EVEN, ratio
from hubring.workers.compare.result.setting_text import words


def first(material: Material) -> dict[str, Any]:
    """Returns the first screen, with the rows of the first setting."""
    findings, panel = material.findings, material.panels[0]
    base = next((each for each in panel.entries if each.row == "ring"), panel.entries[0])
    bars = [bar(material, entry) for entry in panel.entries]
    heads = ["row", material.figures["samples_per_second"].head, f"times {base.row}"]
    lines = [[entry.row, _speed(material, entry), _against(entry, base)] for entry in panel.entries]
    return {
        "answer": findings.answer or next(iter(findings.verdict), "No verdict for this experiment."),
        "title": panel.title,
        "bars": [each for each in bars if each.length],
        "reach": reach(bars),
        "table": Table(f"Speed with {panel.title}", heads, lines),
        "byline": byline(material),
        "trust": _trust(material.findings),
    }


def sentences(material: Material) -> dict[str, Any] | None:
    """Returns the whole verdict; None if there is none."""
    said = material.findings.verdict
    return {"title": "The results in words", "sentences": said} if said else None


def byline(material: Material) -> str:
    """Returns what was run, in one line."""
    findings = material.findings
    seeds = "one seed" if findings.seeds == 1 else f"{findings.seeds} seeds"
    rows, settings = len(findings.row_names), findings.setting_keys
    where = (
        words(findings.setting(settings[0]), settings[0])
        if len(settings) == 1
        else f"{len(settings)} settings"
    )
    parts = [material.goal.job, f"{rows} way{'s' if rows != 1 else ''} to train", where, seeds]
    return " · ".join(parts)


def _trust(findings: Findings) -> str:
    """Returns whether to trust the answer: the gate, what disturbed the runs, and a row that ran twice."""
    gate, noise = findings.gate, findings.noise
    texts = []
    if not gate.agree:
        texts.append("Rows that should agree do not.")
    elif gate.pairs:
        right = ", or differ by right" if gate.excused else ""
        texts.append(f"Rows that were compared agree{right}.")
    if gate.steps:
        texts.append(f"The gate found {'no wrong step' if gate.right else 'wrong steps'}.")
    texts.append(noise.summary)
    if noise.repeat is not None:
        apart, least = mean_apart(noise.repeat.ratios) - 1, max(EVEN, noise.floor) - 1
        runs = f"Two runs of {noise.repeat.row} with the same seed differ by {apart:.1%} on average"
        texts.append(f"{runs}; to win, a row must be more than {least:.1%} faster.")
    return " ".join(texts)


def mean_apart(ratios: Sequence[float]) -> float:
    """Returns the geometric mean of ratios, each of which counts as the larger of itself and its inverse."""
    return exp(fmean(abs(log(each)) for each in ratios))


def _speed(material: Material, entry: Entry) -> str:
    return material.figures["samples_per_second"].interval(entry.number("samples_per_second"))


def _against(entry: Entry, base: Entry) -> str:
    """Returns a row's speed divided by that of the base row."""
    mine, theirs = entry.number("samples_per_second"), base.number("samples_per_second")
    if mine is None or theirs is None:
        return NOTHING
    found = ratio(mine.values, theirs.values)
    return NOTHING if found is None else str(found)

"""The first screen: the answer in one sentence, one chart and a table of three columns, fastest first."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from statistics import fmean
from typing import Any

from hubring.ps.page.kit.figures import NOTHING
from hubring.workers.compare.experiment.row import EVERY
from hubring.workers.compare.page.figure import Label, Table
from hubring.workers.compare.page.material import Material
from hubring.workers.compare.page.sections.throughput import bar, reach
from hubring.workers.compare.result.findings import Entry, Findings
from hubring.workers.compare.result.ratio import EVEN, ratio
from hubring.workers.compare.result.setting_text import words
from hubring.workers.compare.result.statistics import CONFIDENCE, interval_words

NO_BREAK_HYPHEN = "\u2011"
"""Keeps the name of a row in one line."""


def first(material: Material) -> dict[str, Any]:
    """Returns the first screen, with the rows of the first setting."""
    findings, panel = material.findings, material.panels[0]
    base = next((each for each in panel.entries if each.row == "ring"), panel.entries[0])
    entries = sorted(panel.entries, key=lambda entry: entry.median("samples_per_second") or 0.0, reverse=True)
    bars = [bar(material, entry)._replace(label=_explained(material, entry)) for entry in entries]
    answer = findings.answer or next(iter(findings.verdict), "No verdict for this experiment.")
    against = f"times {base.row}"
    heads = ["row", material.figures["samples_per_second"].head, against]
    lines = [[entry.row, _speed(material, entry), _against(entry, base)] for entry in entries]
    return {
        "answer": answer.replace("-", NO_BREAK_HYPHEN),
        "title": panel.title,
        "bars": [each for each in bars if each.length],
        "reach": reach(bars),
        "table": Table(_caption(panel.title, findings.seeds, against), heads, lines),
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
        texts.append("Rows that must train the same parameters do not: see Gate.")
    elif gate.pairs:
        right = ", or differ by right" if gate.excused else ""
        texts.append(f"Rows that must train the same parameters do{right}.")
    if gate.steps:
        judged = sum(each.judged for each in gate.steps)
        found = "none was wrong" if gate.right else "some were wrong: see Gate"
        texts.append(f"{judged:,} steps were computed again in one process, and {found}.")
    texts.append(noise.summary)
    if not noise.quiet:
        texts.append("Repeat the experiment on a machine that does nothing else.")
    if noise.repeat is not None:
        apart, least = mean_apart(noise.repeat.ratios) - 1, max(EVEN, noise.floor) - 1
        texts.append(
            f"Run twice with each seed, {noise.repeat.row} differed from itself by {apart:.1%} on average, so"
            f" a row must be more than {least:.1%} faster to win."
        )
    return " ".join(texts)


def _explained(material: Material, entry: Entry) -> Label:
    """Returns a row's name, with what it does and emulates."""
    label = material.label(entry)
    about = EVERY[entry.row].about if entry.row in EVERY else None
    return label._replace(slept="; ".join(filter(None, [about, label.slept])) or None)


def _caption(title: str, seeds: int, against: str) -> str:
    """Returns what the speeds and their intervals are."""
    if seeds == 1:
        return f"Speed with {title}, and one seed."
    return (
        f"Speed with {title}: medians over {seeds} seeds. The interval in parentheses"
        f" {interval_words(seeds)}. The last column, {against}, is the mean of the seeds' own ratios with its"
        f" {CONFIDENCE:.0%} interval."
    )


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

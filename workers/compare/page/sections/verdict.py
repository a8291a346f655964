"""The first screen: the answer in one sentence, one chart and a table of three columns, fastest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, log
from statistics import fmean
from typing import Any

from hubring.ps.page.kit.figures import NOTHING
from hubring.workers.compare.experiment.row import EVERY
from hubring.workers.compare.page.figure import Label, Table
from hubring.workers.compare.page.material import Material
from hubring.workers.compare.page.sections.throughput import bar, reach
from hubring.workers.compare.result.findings import Entry, Findings, Gate
from hubring.workers.compare.result.ratio import EVEN, ratio
from hubring.workers.compare.result.setting_text import listed, words
from hubring.workers.compare.result.statistics import CONFIDENCE, ENOUGH


def first(material: Material) -> dict[str, Any]:
    """Returns the first screen, with the rows of the first setting."""
    findings, panel = material.findings, material.panels[0]
    base = next((each for each in panel.entries if each.row == "ring"), panel.entries[0])
    entries = sorted(panel.entries, key=lambda entry: entry.median("samples_per_second") or 0.0, reverse=True)
    bars = [bar(material, entry)._replace(label=_explained(material, entry)) for entry in entries]
    against = f"times {base.row}"
    heads = ["row", material.figures["samples_per_second"].head, against]
    lines = [[entry.row, _speed(material, entry), _against(entry, base)] for entry in entries]
    return {
        "answer": findings.answer or next(iter(findings.verdict), "No verdict for this experiment."),
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
    noise = findings.noise
    texts = [*_gate(findings.gate), noise.summary]
    if not noise.quiet:
        texts.append("Repeat the experiment on a quiet machine.")
    if noise.repeat is not None:
        apart, least = mean_apart(noise.repeat.ratios) - 1, max(EVEN, noise.floor) - 1
        runs = f"Run twice with each seed, {noise.repeat.row} differed from itself by {apart:.1%} on average"
        why = "as these repeats scatter, " if noise.floor > EVEN else ""
        texts.append(f"{runs}; {why}differences below {least:.1%} do not count.")
    return " ".join(texts)


def _gate(gate: Gate) -> Iterator[str]:
    """Yields whether rows agree, and whether steps were right."""
    if not gate.agree:
        yield "Rows that must train the same parameters do not: see Gate."
    elif gate.pairs:
        same = {name: None for pair in gate.pairs if not pair.advice for name in (pair.first, pair.second)}
        if same:
            rows = [name for name in same if name in EVERY]  # without the second run of a row
            yield f"{listed(rows)} train the same parameters, as they must."
        if gate.excused:
            yield f"{gate.excused} pair{'s differ' if gate.excused > 1 else ' differs'} by right: see Gate."
    if gate.judged:
        found = "none was wrong" if gate.right else "some were wrong: see Gate"
        yield f"{gate.judged:,} of {gate.taken:,} updates were repeated in one process, and {found}."
    elif not gate.right:
        yield "Some steps were wrong: see Gate."


def _explained(material: Material, entry: Entry) -> Label:
    """Returns a row's name, with what it does and emulates."""
    label = material.label(entry)
    about = EVERY[entry.row].about if entry.row in EVERY else None
    return label._replace(beside="; ".join(filter(None, [about, label.beside])) or None)


def _caption(title: str, seeds: int, against: str) -> str:
    """Returns what the speeds and their intervals are."""
    if seeds == 1:
        return f"Speed with {title}, and one seed"
    interval = "range" if seeds < ENOUGH else f"{CONFIDENCE:.0%} interval"
    return (
        f"Speed with {title}: median of {seeds} seeds (whiskers: {interval}); {against}: geometric mean of"
        f" the seeds' own ratios ({CONFIDENCE:.0%} interval)"
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

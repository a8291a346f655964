"""Noise: how reliable the measurements are."""

from __future__ import annotations

from typing import Any

from hubring.ps.page.kit.figures import NOTHING, digits, percent
from hubring.workers.compare.page.figure import Answer, Table
from hubring.workers.compare.page.material import Material
from hubring.workers.compare.result.noise import Load, Noise
from hubring.workers.compare.result.ratio import EVEN


def noise(material: Material) -> dict[str, Any]:
    """Returns what other programs did on the machine, and the spread of repeats."""
    found = material.findings.noise
    lines = [[row, NOTHING if share is None else percent(share)] for row, share in found.spread.items()]
    heads = ("row", "spread of the step time")
    return {
        "title": "How noisy was the machine?",
        "answer": Answer(found.summary, found.quiet),
        "load": _load(material),
        "said": found.said,
        "repeat": _repeat(found),
        "spread": Table("Range of a row's repeats, relative to their median", heads, lines),
    }


def _repeat(found: Noise) -> str:
    """Returns by how much two runs of the same row differ."""
    if found.repeat is None:
        return ""
    ratios = ", ".join(f"{each:.2f}" for each in found.repeat.ratios)
    return (
        f"{found.repeat.row} ran twice with each seed. Its second run was {ratios} times as fast as its"
        f" first, so this report calls no row faster by less than a factor of {max(EVEN, found.floor):.2f}."
    )


def _load(material: Material) -> str:
    load, foreign = material.findings.noise.load, material.findings.noise.foreign or Load()
    texts = []
    if foreign.median is not None and foreign.max is not None:
        texts.append(f"Other programs used {percent(foreign.median)} of its time in the median run,")
        texts.append(f"{percent(foreign.max)} at most.")
    stolen, stalled = material.findings.noise.stolen, material.findings.noise.stalled
    if stolen is not None and stolen.max:
        texts.append(f"Its hypervisor gave up to {percent(stolen.max)} to other machines.")
    if stalled is not None and stalled.max:
        texts.append(f"Programs waited for memory during up to {percent(stalled.max)} of a run.")
    if load.median is None or load.max is None:
        texts.append("Its load was not recorded.")
    else:
        texts.append(f"1-minute load: median {digits(load.median, 2)}, at most {digits(load.max, 2)}.")
    return " ".join(texts)

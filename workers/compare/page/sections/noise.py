"""Noise: how reliable the measurements are."""

from __future__ import annotations

from typing import Any

from hubring.ps.page.kit.figures import NOTHING, digits, percent
from hubring.workers.compare.page.figure import Answer, Table
from hubring.workers.compare.page.material import Material
from hubring.workers.compare.result.findings import Load
from hubring.workers.compare.result.statistics import by_chance


def noise(material: Material) -> dict[str, Any]:
    """Returns what other programs did on the machine, and the spread of repeats."""
    found = material.findings.noise
    word = "The machine was idle." if found.quiet else "Other programs were busy on the machine."
    lines = [[row, NOTHING if share is None else percent(share)] for row, share in found.spread.items()]
    heads = ("row", "spread of the step time")
    return {
        "title": "How noisy was the machine?",
        "answer": Answer(word, found.quiet),
        "load": _load(material),
        "said": found.said,
        "chance": by_chance(material.findings.seeds),
        "spread": Table("Range of a row's repeats, relative to their median", heads, lines),
    }


def _load(material: Material) -> str:
    load, foreign = material.findings.noise.load, material.findings.noise.foreign or Load()
    texts = []
    if foreign.median is not None and foreign.max is not None:
        texts.append(f"Other programs used {percent(foreign.median)} of its time in the median run,")
        texts.append(f"{percent(foreign.max)} at most.")
    if load.median is None or load.max is None:
        texts.append("Its load was not recorded.")
    else:
        texts.append(f"1-minute load: median {digits(load.median, 2)}, at most {digits(load.max, 2)}.")
    return " ".join(texts)

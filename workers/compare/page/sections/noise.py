"""Noise: how far all of the above can be trusted."""

from __future__ import annotations

from typing import Any

from hubring.ps.page.kit.figures import NOTHING, digits, percent
from hubring.workers.compare.page.figure import Answer, Table
from hubring.workers.compare.page.material import Material
from hubring.workers.compare.result.findings import Load
from hubring.workers.compare.result.statistics import by_chance


def noise(material: Material) -> dict[str, Any]:
    """What else the machine did, and how far repeats of one row were apart."""
    found = material.findings.noise
    word = "The machine was quiet." if found.quiet else "The machine was busy with something else."
    lines = [[row, NOTHING if share is None else percent(share)] for row, share in found.spread.items()]
    heads = ("row", "spread of the step time")
    return {
        "title": "How noisy was it?",
        "answer": Answer(word, found.quiet),
        "load": _load(material),
        "said": found.said,
        "chance": by_chance(material.findings.seeds),
        "spread": Table("How far repeats of a row were apart, relative to their median", heads, lines),
    }


def _load(material: Material) -> str:
    load, foreign = material.findings.noise.load, material.findings.noise.foreign or Load()
    said = []
    if foreign.median is not None and foreign.max is not None:
        said.append(f"Of its time other programs took {percent(foreign.median)} in the median run,")
        said.append(f"{percent(foreign.max)} at most.")
    if load.median is None or load.max is None:
        said.append("Its load was not recorded.")
    else:
        said.append(f"1-minute load: median {digits(load.median, 2)}, at most {digits(load.max, 2)}.")
    return " ".join(said)

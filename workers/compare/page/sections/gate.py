"""The gate: whether rows that should compute the same did so."""

from __future__ import annotations

from typing import Any

from hubring.workers.compare.page.figure import Answer, Table
from hubring.workers.compare.page.material import Material
from hubring.workers.compare.result.findings import Pair

HEADS = ("row", "compared with", "setting", "seed", "difference", "allowed", "in", "result")
WORDS = ("compared with", "setting", "in", "result")


def gate(material: Material) -> dict[str, Any]:
    """Returns the answer and every pair."""
    judged, rows = material.findings.gate, material.findings.rows
    withheld = [each for each in rows if each.withheld is not None]
    lines = [_line(pair) for pair in sorted(judged.pairs, key=lambda each: each.passed)]
    pairs = Table("All pairs of runs that were compared", HEADS, lines, WORDS)
    title = "Did the rows compute the same?"
    return {"title": title, "judged": judged, "withheld": withheld, "pairs": pairs}


def _line(pair: Pair) -> list[str | Answer]:
    seed = "" if pair.seed is None else str(pair.seed)
    allowed = f"{pair.limit:g}" if pair.limit else "nothing"
    result = Answer("agrees" if pair.passed else "differs", pair.passed)
    found = f"{float(pair.difference):.2g}"
    return [pair.second, pair.first, pair.setting, seed, found, allowed, pair.tensor, result]

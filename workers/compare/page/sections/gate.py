"""The gate: whether the rows that ought to compute the same did."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hubring.workers.compare.findings import Pair
from hubring.workers.compare.page.figure import Answer, Column, Table
from hubring.workers.compare.page.material import Material

COLUMNS = (
    Column("row"),
    Column("held against", words=True),
    Column("setting", words=True),
    Column("seed"),
    Column("differs by"),
    Column("allowed"),
    Column("in", words=True),
    Column("result", words=True),
)


def gate(material: Material) -> dict[str, Any]:
    """Yes or no, what that means, and every pair."""
    judged, rows = material.findings.gate, material.findings.rows
    withheld = [each for each in rows if each.withheld is not None]
    pairs = Table("Every pair of runs that was held against each other", COLUMNS, _lines(judged.pairs))
    return {"judged": judged, "withheld": withheld, "pairs": pairs}


def _lines(pairs: Iterable[Pair]) -> list[list[str | Answer]]:
    return [_line(pair) for pair in sorted(pairs, key=lambda each: each.passed)]


def _line(pair: Pair) -> list[str | Answer]:
    seed = "" if pair.seed is None else str(pair.seed)
    allowed = f"{pair.limit:g}" if pair.limit else "nothing"
    result = Answer("agrees" if pair.passed else "differs", pair.passed)
    found = f"{float(pair.difference):.2g}"
    return [pair.second, pair.first, pair.setting, seed, found, allowed, pair.tensor, result]

"""The gate: whether rows that should compute the same agree, and whether their steps are right."""

from __future__ import annotations

from typing import Any

from hubring.workers.compare.page.figure import Answer, Table
from hubring.workers.compare.page.material import Material
from hubring.workers.compare.result.drift import drift
from hubring.workers.compare.result.findings import Pair, StepCheck
from hubring.workers.compare.result.record_share import record_share

HEADS = ("row", "compared with", "setting", "seed", "difference", "allowed", "in", "at the end", "result")
WORDS = ("compared with", "setting", "in", "result")
STEP_HEADS = ("row", "setting", "seed", "steps", "re-checked", "result", "what is wrong")
STEP_WORDS = ("setting", "result", "what is wrong")


def gate(material: Material) -> dict[str, Any]:
    """Returns the answer and every pair."""
    judged, rows = material.findings.gate, material.findings.rows
    withheld = [each for each in rows if each.withheld is not None]
    lines = [_line(pair) for pair in sorted(judged.pairs, key=lambda each: each.passed)]
    pairs = Table("All pairs of runs that were compared", HEADS, lines, WORDS)
    checked = [_step_line(each) for each in sorted(judged.steps, key=lambda each: each.passed)]
    steps = Table("All runs whose steps were re-checked", STEP_HEADS, checked, STEP_WORDS)
    title = "Do the rows agree, and is every step right?"
    advice = [each.advice for each in judged.pairs] + [each.advice for each in judged.steps]
    return {
        "title": title,
        "judged": judged,
        "withheld": withheld,
        "pairs": pairs,
        "steps": steps,
        "advice": list(dict.fromkeys(filter(None, advice))),
        "drift": drift(judged),
        "cost": record_share(material.findings),
    }


def _line(pair: Pair) -> list[str | Answer]:
    seed = "" if pair.seed is None else str(pair.seed)
    allowed = f"{pair.limit:g}" if pair.limit else "nothing"
    result = Answer(("by right" if pair.advice else "agrees") if pair.passed else "differs", pair.passed)
    found, final = (f"{float(each):.2g}" for each in (pair.difference, pair.final))
    return [pair.second, pair.first, pair.setting, seed, found, allowed, pair.tensor, final, result]


def _step_line(each: StepCheck) -> list[str | Answer]:
    result = Answer("right" if each.passed else "wrong", each.passed)
    wrong = f"step {each.step}: {each.fault}" if each.step else each.fault
    return [
        each.row,
        each.setting,
        str(each.seed),
        f"{each.steps:,}",
        f"{each.judged:,}",
        result,
        wrong or each.unjudged,
    ]

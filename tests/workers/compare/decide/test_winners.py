"""A report rarely names a false winner, however many rows it compares, and winners are what it decides."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from hubring.workers.compare.decide.decision import SPEED, Comparisons
from hubring.workers.compare.decide.ratio import CHANCE, holm
from hubring.workers.compare.decide.verdict import answer
from hubring.workers.compare.decide.verdict import verdict as verdict_on
from hubring.workers.compare.findings import Findings, RowResult
from hubring.workers.compare.plan.experiment import FaultTable
from hubring.workers.compare.statistics import SPEEDS, Number
from tests.support.compare.replayed import Replayed, findings, paced

WINNERS = (
    "beats",
    "loses",
    "times as fast",
    "times as long",
    "more slowly",
    "faster than the single process",
    "better result",
    "worse result",
    "first to reach test accuracy 0.93 is",
)
REPORTS = 100


def test_levels_are_those_of_holm() -> None:
    # 0.001 <= 0.05/4, but 0.02 > 0.05/3: only the first is decided.
    assert 0.001 <= holm([0.04, 0.001, 0.02, 0.6]) < 0.02
    # 0.015 <= 0.05/3, but 0.04 > 0.05/2.
    assert 0.015 <= holm([0.04, 0.001, 0.015, 0.6]) < 0.04


def test_the_set_of_comparisons_does_not_depend_on_decisions(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"rows": ("ring", "hub-bsp", "hub-asp", "local"), "seeds": (0, 1, 2)}
    even = Comparisons(findings(tmp_path / "even", paced({}), **asked))
    apart = Comparisons(findings(tmp_path / "apart", paced({"ring": 0.02, "hub-asp": 0.005}), **asked))
    assert any(each and each.decided for each in apart.ratios.values())
    assert even.ratios.keys() == apart.ratios.keys()


def test_reading_a_ratio_changes_no_other(tmp_path: Path) -> None:
    compared = Comparisons(findings(tmp_path, paced({"ring": 0.02}), seeds=(0, 1, 2)))
    before = dict(compared.ratios)
    assert {each.level for each in before.values() if each} == {
        holm(each.chance for each in before.values() if each)
    }
    verdict_on(compared, ())
    answer(compared)
    assert compared.ratios == before


@pytest.mark.parametrize(("rows", "seeds"), [(2, 3), (6, 3), (6, 5)])
def test_equal_rows_rarely_have_a_winner(tmp_path: Path, rows: int, seeds: int) -> None:
    names = ("ring", "hub-bsp", "ddp", "hub-asp", "hub-aggregate", "hub-ssp")[:rows]
    even = findings(tmp_path, Replayed(), rows=names, seeds=tuple(range(seeds)))
    random = Random(f"{rows} {seeds}")
    false = sum(claims(replace(even, rows=[noisy(row, random) for row in even.rows])) for _ in range(REPORTS))
    assert false <= REPORTS * CHANCE + 3 * math.sqrt(REPORTS * CHANCE * (1 - CHANCE))


def noisy(row: RowResult, random: Random) -> RowResult:
    """Returns a row whose runs' speeds have 5 % of noise."""
    paces = [math.exp(random.gauss(0, 0.05)) for _ in row.seeds]

    def number(name: str, known: Number) -> Number | None:
        power = -1 if name == SPEED else 1 if name in SPEEDS else 0
        both = zip(known.values, paces, strict=True)
        return Number.of([value and value * pace**power for value, pace in both])

    return replace(row, numbers={name: each and number(name, each) for name, each in row.numbers.items()})


def claims(found: Findings) -> bool:
    """Whether a report on equal rows names a winner."""
    said = "\n".join(verdict_on(Comparisons(found), ()))
    return any(word in said for word in WINNERS)


@pytest.mark.parametrize("changes", [{"workers": (1,)}, {"fault": FaultTable(rank=1, step=9)}])
def test_comparisons_with_one_process_that_are_not_reported_do_not_count(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    rows = ("local", "ring", "hub-bsp", "hub-shm")
    compared = Comparisons(findings(tmp_path, paced({}), rows=rows, seeds=(0, 1, 2), **changes))
    alone = {key[1:] for key in compared.ratios if key[0] == SPEED and "local" in str(key)}
    # With one worker the answer still says whether one process alone is faster than its two rows.
    assert len(alone) == (2 if "workers" in changes else 0)
    assert "hub-shm" not in str(alone)


def test_the_first_to_the_target_counts_all_pairs(tmp_path: Path) -> None:
    rows = ("ring", "hub-bsp", "hub-asp", "ddp")
    found = findings(tmp_path, paced({"ring": 0.02}), rows=rows, seeds=(0, 1, 2))
    assert sum(key[0] == "seconds_to_target" for key in Comparisons(found).ratios) == 6

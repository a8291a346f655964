"""A report names a false winner in at most 5 % of cases, however many rows it compares."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hubring.workers.compare.experiment.experiment import FaultTable
from hubring.workers.compare.judge.verdict import verdict as verdict_on
from hubring.workers.compare.result.comparisons import Comparisons
from hubring.workers.compare.result.family import Family
from hubring.workers.compare.result.ratio import CHANCE
from tests.support.compare.paced import paced, verdict
from tests.support.compare.replayed import Replayed, findings, record

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
REPORTS = 60


def test_a_single_comparison_has_the_whole_chance() -> None:
    assert Family().level("a", 0.03) == CHANCE


def test_levels_are_those_of_holm() -> None:
    family = Family()
    for name, chance in (("a", 0.04), ("b", 0.001), ("c", 0.02), ("d", 0.6)):
        family.level(name, chance)
    # 0.001 <= 0.05/4, but 0.02 > 0.05/3: only b is decided.
    assert 0.001 <= family.threshold < 0.02
    family.level("c", 0.015)
    # 0.015 <= 0.05/3, but 0.04 > 0.05/2.
    assert 0.015 <= family.threshold < 0.04


def test_comparisons_that_follow_from_others_count_too() -> None:
    family = Family()

    def say() -> list[str]:
        decided = [name for name, chance in (("a", 0.03),) if chance <= family.level(name, chance)]
        return decided + [name for name in ("b",) if decided and family.level(name, 0.9) > 1]

    assert family.settle(say) == []


@pytest.mark.parametrize(("rows", "seeds"), [(2, 3), (6, 3), (6, 5)])
def test_equal_rows_rarely_have_a_winner(tmp_path: Path, rows: int, seeds: int) -> None:
    names = ("ring", "hub-bsp", "ddp", "hub-asp", "hub-aggregate", "hub-ssp")[:rows]
    false = sum(
        claims(tmp_path / str(report), names, seeds, Random(f"{rows} {seeds} {report}"))
        for report in range(REPORTS)
    )
    assert false <= REPORTS * CHANCE + 3 * math.sqrt(REPORTS * CHANCE * (1 - CHANCE))


def claims(folder: Path, rows: tuple[str, ...], seeds: int, random: Random) -> bool:
    """Whether a report on equal rows names a winner; each run's speed has 5 % of noise."""
    trainer = Replayed(records=lambda run: record(0.01 * math.exp(random.gauss(0, 0.05)), pause=0.0))
    said = verdict(folder, trainer, rows=rows, seeds=tuple(range(seeds)))
    return any(word in said for word in WINNERS)


@pytest.mark.parametrize("changes", [{"workers": (1,)}, {"fault": FaultTable(rank=1, step=9)}])
def test_what_the_report_does_not_compare_with_one_process_does_not_count(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    found = findings(tmp_path, paced({}), rows=("local", "ring", "hub-bsp"), seeds=(0, 1, 2), **changes)
    family = Family()
    verdict_on(Comparisons(found, family))
    alone = [each for each in family._chances if "samples_per_second" in str(each) and "local" in str(each)]
    assert alone == []


def test_who_is_first_counts_all_pairs(tmp_path: Path) -> None:
    found = findings(
        tmp_path, paced({"ring": 0.02}), rows=("ring", "hub-bsp", "hub-asp", "ddp"), seeds=(0, 1, 2)
    )
    family = Family()
    verdict_on(Comparisons(found, family))
    assert sum("seconds_to_target" in str(each) for each in family._chances) == 6

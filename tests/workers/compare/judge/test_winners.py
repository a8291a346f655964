"""Winners of many reports are what these decided, whatever their sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.compare.paced import SEEDS, paced
from tests.support.compare.replayed import findings
from tests.support.compare.winners import Comparison, chance, interval, null_result, opposite, said, winners

ASP, BSP, RING = ("n2 k1", "hub-asp"), ("n2 k1", "hub-bsp"), ("n2 k1", "ring")


def decided(folder: Path, steps: dict[str, float], *rows: str) -> dict[Comparison, bool]:
    """Returns what a report with these seconds per step decides."""
    return winners(findings(folder, paced(steps), rows=rows, seeds=SEEDS))


@pytest.mark.parametrize(
    ("rows", "comparison"),
    [
        # "times as fast as hub-bsp" against "more slowly than hub-bsp"
        (("hub-bsp", "hub-asp"), ("samples_per_second", ASP, BSP)),
        # "first to reach is ring" against "first to reach is hub-bsp"
        (("ring", "hub-bsp"), ("seconds_to_target", BSP, RING)),
        (("ring", "hub-bsp"), ("samples_per_second", BSP, RING)),
        # "faster than the single process: ring"
        (("local", "ring", "hub-bsp"), ("samples_per_second", ("n2 k1", "local"), RING)),
    ],
)
def test_opposite_winners_are_found_in_every_kind_of_sentence(
    tmp_path: Path, rows: tuple[str, ...], comparison: Comparison
) -> None:
    slow = rows[-1] if rows[0] != "local" else "ring"
    one = decided(tmp_path / "one", {slow: 0.04}, *rows)
    other = decided(tmp_path / "other", {slow: 0.002}, *rows)
    assert comparison in one
    assert comparison in opposite([one, {}, other])
    assert opposite([one, one]) == []


def test_only_the_same_rows_can_have_opposite_winners() -> None:
    one: dict[Comparison, bool] = {("samples_per_second", BSP, RING): True}
    assert opposite([one, {("samples_per_second", ASP, RING): False}, {}]) == []
    assert opposite([one, {("seconds_to_target", BSP, RING): False}]) == []


def test_equal_rows_have_no_winner(tmp_path: Path) -> None:
    assert decided(tmp_path, {}, "hub-bsp", "hub-shm") == {}


def test_a_winner_is_named_with_its_number(tmp_path: Path) -> None:
    found = decided(tmp_path, {"ring": 0.02}, "ring", "hub-bsp")
    assert "samples_per_second of hub-bsp (n2 k1) > ring (n2 k1)" in [said(*each) for each in found.items()]


@pytest.mark.parametrize(
    ("named", "good", "bound"), [(0, True, "yes"), (2, True, "yes"), (3, True, "no"), (6, False, "no")]
)
def test_the_share_of_false_winners_is_judged_by_its_interval(named: int, good: bool, bound: str) -> None:
    text, found = null_result(named, 40)
    assert found is good
    assert text.endswith(f"at most 2 of 40: {bound}")


def test_a_program_that_names_as_many_as_it_may_rarely_fails() -> None:
    fails = min(named for named in range(41) if not null_result(named, 40)[1])
    assert chance(fails, 40, 0.05) <= 0.025
    assert chance(3, 40, 0.05) == pytest.approx(0.323, abs=0.001)


def test_the_interval_is_clopper_s_and_pearson_s() -> None:
    assert interval(2, 40) == pytest.approx((0.0061, 0.1692), abs=0.0001)
    assert interval(0, 10) == pytest.approx((0.0, 0.3085), abs=0.0001)
    assert interval(10, 10) == pytest.approx((0.6915, 1.0), abs=0.0001)

"""Intervals and probabilities are exact, and a claim of difference needs more than one seed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hubring.workers.compare.result.ratio import Ratio, ratio
from hubring.workers.compare.result.statistics import (
    Interval,
    interval_words,
    median_interval,
    quantile,
    tail,
)


def held(outside: int, count: int) -> float:
    """How often the median lies between the values of which so many are outside, by all tosses of a coin."""
    tosses = [sum(coins) for coins in product((0, 1), repeat=count)]
    return sum(outside < above < count - outside for above in tosses) / len(tosses)


def test_one_value_is_its_own_interval() -> None:
    assert median_interval([4.0]) == Interval(4.0, 4.0, 4.0)


def test_three_values_are_told_by_their_range() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == Interval(2.0, 1.0, 3.0)


@pytest.mark.parametrize("count", range(6, 14))
def test_from_six_values_on_the_interval_holds_the_median_as_often_as_is_said(count: int) -> None:
    values = [float(place) for place in range(count)]
    found = median_interval(values)
    outside = int(found.low)
    assert found == Interval(median(values), outside, count - 1 - outside)
    assert held(outside, count) >= 0.95
    assert held(outside + 1, count) < 0.95


@pytest.mark.parametrize("count", range(2, 6))
def test_up_to_five_values_give_their_range_which_holds_less_than_that(count: int) -> None:
    found = median_interval([float(place) for place in range(count)])
    assert (found.low, found.high) == (0, count - 1)
    assert f"contains the median in {held(0, count):.0%} of cases" in interval_words(count)
    assert held(0, count) < 0.95


def test_less_confidence_gives_a_narrower_interval() -> None:
    values = [float(value) for value in range(21)]
    wide, narrow = median_interval(values), median_interval(values, confidence=0.5)
    assert wide.low < narrow.low < narrow.median < narrow.high < wide.high


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_order_changes_nothing_and_the_median_lies_within(values: list[float]) -> None:
    found = median_interval(values)
    assert median_interval(values[::-1]) == found
    assert min(values) <= found.low <= found.median <= found.high <= max(values)


@pytest.mark.parametrize("values", [[], [float("nan")], [1.0, float("inf")]])
def test_no_median_is_made_of_nothing_or_of_what_is_not_finite(values: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one value, all of them finite"):
        median_interval(values)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0])
def test_a_confidence_is_a_share(confidence: float) -> None:
    with pytest.raises(ValueError, match="above 0 and below 1"):
        median_interval([1.0], confidence=confidence)


@pytest.mark.parametrize(
    ("t", "freedom", "chance"),
    # Abramowitz and Stegun, table 26.10: percentage points of the t-distribution.
    [
        *((12.706, 1, 0.05), (4.303, 2, 0.05), (3.182, 3, 0.05), (2.776, 4, 0.05), (2.228, 10, 0.05)),
        *((31.821, 1, 0.02), (9.925, 2, 0.01), (2.845, 20, 0.01), (0.765, 3, 0.5), (0.741, 4, 0.5)),
    ],
)
def test_the_tails_are_those_of_the_tables(t: float, freedom: int, chance: float) -> None:
    assert tail(t, freedom) == pytest.approx(chance, rel=2e-3)
    assert tail(-t, freedom) == tail(t, freedom)
    assert quantile(chance, freedom) == pytest.approx(t, rel=1e-3)


def test_rows_differ_where_every_seed_says_so_though_seeds_vary_more_than_rows() -> None:
    fast, slow = [10.0, 20.0, 40.0], [11.0, 22.2, 43.9]
    faster, slower = ratio(fast, slow), ratio(slow, fast)
    assert faster is not None
    assert slower is not None
    assert faster.decided
    assert slower.decided
    assert slower.value == pytest.approx(1.1, rel=0.01)


def test_rows_do_not_differ_where_seeds_disagree() -> None:
    for others in ([11.0, 18.0, 43.0], [10.0, 20.0, 40.0]):
        found = ratio([10.0, 20.0, 40.0], others)
        assert found is not None
        assert not found.decided


def test_one_seed_decides_nothing() -> None:
    for found in (ratio([1.0], [9.0]), ratio([1.0, None, 5.0], [9.0, 8.0, None])):
        assert found is not None
        assert found.value == pytest.approx(1 / 9)
        assert (found.decided, found.even, found.needed, found.interval) == (False, False, None, None)


def test_only_seeds_that_have_both_values_count() -> None:
    found = ratio([2.0, None, 4.0], [1.0, 7.0, 2.0])
    assert found is not None
    assert found.value == pytest.approx(2.0)
    assert (found.spread, found.seeds) == (0.0, 2)


def test_a_difference_below_that_of_two_equal_runs_is_not_decided() -> None:
    found = ratio([1.10, 1.101, 1.102], [1.0, 1.0, 1.0])
    assert found is not None
    assert found.decided
    assert not replace(found, floor=1.15).decided
    assert not replace(found, doubt="other programs used 40% of the machine").decided


def test_the_seeds_that_would_decide_are_counted() -> None:
    found = ratio([1.2, 1.0, 1.3], [1.0, 1.0, 1.0])
    assert found is not None
    assert not found.decided
    assert found.needed == 6
    assert found.spread is not None
    assert Ratio(found.value, found.spread, 6).decided
    assert not Ratio(found.value, found.spread, 5).decided
    close = ratio([1.02, 1.0, 1.03], [1.0, 1.0, 1.0])
    assert close is not None
    assert close.needed is None


def test_rows_with_other_seeds_cannot_be_paired() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0, 2.0], [1.0])


def test_it_is_said_how_often_an_interval_holds_the_median() -> None:
    assert interval_words(3) == "is the range of the 3 seeds, which contains the median in 75% of cases"
    assert interval_words(6) == "is the interval that contains the median in at least 95% of cases"


@pytest.mark.parametrize(
    ("first", "second", "decided"),
    [
        ([2.0, 2.1, 2.2], [1.0, 1.1, 1.2], True),
        ([2.0, 0.9, 2.2], [1.0, 1.0, 1.0], False),
        ([1.01, 1.02, 1.02], [1.0, 1.0, 1.0], False),
        ([9.0], [1.0], False),
    ],
)
def test_a_ratio_is_decided_where_its_interval_and_its_size_say_so(
    first: list[float], second: list[float], decided: bool
) -> None:
    found = ratio(first, second)
    assert found is not None
    assert found.decided is decided


def test_seeds_that_lack_a_number_are_left_out_of_the_ratio() -> None:
    found = ratio([None, 2.0], [1.0, 1.0])
    assert found is not None
    assert found.value == pytest.approx(2.0)
    assert found.seeds == 1
    assert ratio([None], [1.0]) is None


@pytest.mark.parametrize("wrong", [None, 0.0, -1.0, float("nan")])
def test_what_is_not_above_zero_has_no_ratio(wrong: float | None) -> None:
    assert ratio([wrong], [2.0]) is None
    assert ratio([2.0], [wrong]) is None

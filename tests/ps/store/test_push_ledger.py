"""Exactly once: what the ledger makes of repeated, skipped and outlived pushes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hubring.ps.core.types import Sender
from hubring.ps.store.push_ledger import Ledger, Standing

RANK0 = Sender(0, incarnation=1)
REBORN = Sender(0, incarnation=2)


def test_a_push_goes_from_new_over_in_progress_to_completed() -> None:
    ledger = Ledger()
    assert ledger.classify(RANK0, 7, 0) is Standing.NEW
    ledger.begin(RANK0, 7)
    assert ledger.classify(RANK0, 7, 0) is Standing.IN_PROGRESS
    ledger.advance(RANK0, 7, 1)
    assert ledger.classify(RANK0, 7, 0) is Standing.COMPLETED
    assert ledger.classify(RANK0, 7, 1) is Standing.NEW


def test_a_push_beyond_the_expected_one_is_a_gap() -> None:
    ledger = Ledger()
    assert ledger.classify(RANK0, 7, 1) is Standing.GAP
    assert ledger.expected(RANK0, 7) == 0


def test_keys_and_ranks_are_counted_apart() -> None:
    ledger = Ledger()
    ledger.advance(RANK0, 7, 5)
    assert ledger.expected(RANK0, 8) == 0
    assert ledger.expected(Sender(1, 1), 7) == 0
    assert ledger.clocks(7) == {0: 5}


def test_skipped_clocks_count_as_completed() -> None:
    ledger = Ledger()
    ledger.begin(RANK0, 7)
    ledger.advance(RANK0, 7, 9)
    assert ledger.classify(RANK0, 7, 4) is Standing.COMPLETED
    assert ledger.classify(RANK0, 7, 9) is Standing.NEW


def test_a_later_life_fences_the_earlier_for_good() -> None:
    ledger = Ledger()
    ledger.begin(RANK0, 7)
    ledger.advance(REBORN, 7, 3)
    assert ledger.classify(RANK0, 7, 3) is Standing.FENCED
    assert ledger.classify(REBORN, 7, 3) is Standing.NEW
    ledger.advance(RANK0, 7, 8)
    assert ledger.expected(REBORN, 7) == 3
    ledger.retain([])
    assert ledger.classify(RANK0, 7, 0) is Standing.FENCED


def test_what_an_earlier_life_had_in_progress_is_new_to_the_next() -> None:
    ledger = Ledger()
    ledger.begin(RANK0, 7)
    assert ledger.classify(REBORN, 7, 0) is Standing.NEW
    ledger.advance(REBORN, 8, 0)
    assert ledger.classify(REBORN, 7, 0) is Standing.NEW


def test_only_the_ranks_retained_keep_their_clocks_and_progress() -> None:
    ledger = Ledger()
    other = Sender(1, 1)
    for sender in (RANK0, other):
        ledger.advance(sender, 7, 4)
        ledger.begin(sender, 7)
    ledger.retain([1])
    assert ledger.clocks(7) == {1: 4}
    assert ledger.classify(other, 7, 4) is Standing.IN_PROGRESS
    assert ledger.classify(RANK0, 7, 0) is Standing.NEW


def test_completed_pushes_outlive_a_restart_and_those_in_progress_are_pushed_again() -> None:
    before, after = Ledger(), Ledger()
    before.advance(RANK0, 7, 4)
    before.begin(RANK0, 7)
    after.restore(7, dict(before.clocks(7)))
    assert after.classify(RANK0, 7, 3) is Standing.COMPLETED
    assert after.classify(RANK0, 7, 4) is Standing.NEW


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 12)))
def test_every_clock_is_new_at_most_once_however_pushes_are_repeated(clocks: list[int]) -> None:
    ledger = Ledger()
    applied: list[int] = []
    for clock in clocks:
        if ledger.classify(RANK0, 0, clock) is Standing.NEW:
            ledger.begin(RANK0, 0)
            ledger.advance(RANK0, 0, clock + 1)
            applied.append(clock)
    assert applied == list(range(len(applied)))

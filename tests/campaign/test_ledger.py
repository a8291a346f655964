"""The oracle finds every push that counts twice, in part or not at all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.campaign import ledger

STEPS, WORKERS = 5, 3


def filled(share: float) -> Tensor:
    """Returns a ledger in which each push left this share."""
    values = torch.zeros(ledger.ROWS, WORKERS)
    values[:STEPS] = share
    return values


def test_a_ledger_of_means_and_one_of_single_pushes_are_right() -> None:
    assert ledger.applied_wrongly(filled(1 / 3), STEPS, mean=True) == []
    assert ledger.applied_wrongly(filled(1.0), STEPS, mean=False) == []
    assert ledger.unfilled(filled(1 / 3), STEPS) == []
    assert ledger.foreign(filled(1.0), STEPS) == []


def test_a_round_without_a_lost_worker_is_right() -> None:
    values = filled(1 / 3)
    values[3:STEPS] = torch.tensor([0.5, 0.0, 0.5])
    assert ledger.applied_wrongly(values, STEPS, mean=True) == []
    assert ledger.unfilled(values, STEPS) == []


@pytest.mark.parametrize("mean", [True, False])
def test_a_push_that_counts_twice_is_found(mean: bool) -> None:
    values = filled(1 / 3 if mean else 1.0)
    values[2, 1] *= 2
    (found,) = ledger.applied_wrongly(values, STEPS, mean)
    assert "rank 1 in step 2" in found


def test_a_push_in_part_is_found() -> None:
    values = filled(1.0)
    values[4, 0] = 0.5
    assert len(ledger.applied_wrongly(values, STEPS, mean=False)) == 1


def test_an_acknowledged_push_that_left_nothing_is_found() -> None:
    values = filled(1.0)
    values[2, 1] = values[4, 2] = 0.0
    (found,) = ledger.missing(values, {(step, rank) for step in range(5) for rank in range(3)} - {(4, 2)})
    assert "rank 1 in step 2" in found


def test_a_changed_bit_beside_the_pushes_is_found() -> None:
    values = filled(1.0)
    values[100, 1] = 1e-40
    assert len(ledger.foreign(values, STEPS)) == 1


def test_a_round_that_applied_nothing_is_found() -> None:
    values = filled(1 / 3)
    values[2] = 0
    (found,) = ledger.unfilled(values, STEPS)
    assert "step 2" in found


def backed_up() -> Tensor:
    """Returns a ledger of rounds with two of three workers: one push of each step was dropped."""
    values = filled(0.5)
    values[:STEPS, 2] = 0
    return values


def test_rounds_of_backup_workers_add_up() -> None:
    assert ledger.counted_wrongly(backed_up(), STEPS, rounds=STEPS) == []


def test_a_dropped_push_that_counts_is_found() -> None:
    values = backed_up()
    values[1, 2] = 0.5
    (found,) = ledger.counted_wrongly(values, STEPS, rounds=STEPS)
    assert "add up to 5.5, expected 5" in found


def test_a_push_that_counts_in_two_rounds_of_backup_workers_is_found() -> None:
    values = backed_up()
    values[1, 0] = 1.0
    (found,) = ledger.counted_wrongly(values, STEPS, rounds=STEPS)
    assert "add up to 5.5, expected 5" in found


def test_a_share_of_no_round_of_backup_workers_is_found() -> None:
    values = backed_up()
    values[1, 0] = 0.7
    assert len(ledger.counted_wrongly(values, STEPS, rounds=-1)) == 1

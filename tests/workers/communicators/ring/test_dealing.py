"""Samples are dealt once, whatever happens to the ranks."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from torch import Tensor

from hubring.workers.communicators.ring.dealing import Change, Epoch, shares


def lists(length: int, epoch: Epoch) -> list[list[int]]:
    return [share.tolist() for share in shares(length, epoch)]


def replay(length: int, epoch: Epoch) -> dict[int, int]:
    """Returns how often each position of an epoch is trained on, by every rank from its entry to its loss."""
    counts: dict[int, int] = dict.fromkeys(range(length), 0)
    entered = [0] * epoch.size
    before = epoch._replace(changes=())
    for number, change in enumerate(epoch.changes, start=1):
        for rank, share in enumerate(shares(length, before)):
            if rank not in change.stays:
                _count(counts, share[entered[rank] : change.trained])
        entered = [entered[rank] for rank in change.stays]
        entered += [change.trained] * (change.size - len(change.stays))
        before = epoch._replace(changes=epoch.changes[:number])
    for rank, share in enumerate(shares(length, before)):
        _count(counts, share[entered[rank] :])
    return counts


def _count(counts: dict[int, int], positions: Tensor) -> None:
    for position in positions.tolist():
        counts[position] += 1


def test_without_changes_ranks_take_turns_and_a_remainder_is_dropped() -> None:
    assert lists(7, Epoch(0, 3)) == [[0, 3], [1, 4], [2, 5]]


def test_what_a_lost_rank_has_not_trained_on_is_dealt_again() -> None:
    epoch = Epoch(0, 3, (Change(2, 2, (0, 2), 2),))
    assert lists(12, epoch) == [[0, 3, 6, 8, 10], [2, 5, 7, 9, 11]]
    again = Epoch(0, 3, (Change(1, 2, (0, 2), 2),))  # the second batch was in flight
    assert lists(12, again) == [[0, 3, 4, 7, 9], [2, 5, 6, 8, 10]]


def test_a_newcomer_begins_behind_what_the_others_have_trained_on() -> None:
    epoch = Epoch(0, 2, (Change(2, 2, (0, 1), 3),))
    assert lists(10, epoch) == [[0, 2, 4, 7], [1, 3, 5, 8], [0, 2, 6, 9]]
    assert set(replay(10, epoch).values()) == {1}


def test_a_newcomer_first_gets_what_the_others_have_drawn_ahead() -> None:
    epoch = Epoch(0, 2, (Change(1, 3, (0, 1), 3),))
    assert lists(14, epoch) == [[0, 2, 4, 8, 11], [1, 3, 5, 9, 12], [0, 6, 7, 10, 13]]
    assert set(replay(14, epoch).values()) == {1}


@pytest.mark.parametrize("seed", range(20))
def test_no_sample_is_lost_or_trained_on_twice(seed: int) -> None:
    """The last ranks' remainder is all that is missing."""
    chance = random.Random(seed)
    length, size, trained = chance.randrange(300, 500), chance.randrange(2, 6), 0
    first, changes = size, []
    for _ in range(chance.randrange(1, 8)):
        trained += chance.randrange(4)
        stays = tuple(rank for rank in range(size) if rank == 0 or chance.random() < 0.7)
        size = len(stays) + chance.randrange(0, 3)
        drawn = trained + chance.randrange(3)
        changes.append(Change(trained, drawn, stays, size))
        trained = drawn
    epoch = Epoch(0, first, tuple(changes))
    counts = Counter(replay(length, epoch).values())
    assert set(counts) <= {0, 1}
    assert counts[0] < size
    assert len({len(share) for share in shares(length, epoch)}) == 1

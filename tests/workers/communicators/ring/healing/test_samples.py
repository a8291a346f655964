"""The position of a sampler, and how it is agreed on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import islice

import pytest
import torch

from hubring.workers.communicators.ring.healing.samples import Change, Epoch, Position, Samples, shares


def replay(length: int, epoch: Epoch) -> list[int]:
    """Returns how often each position of an epoch is trained on, by every rank from its entry to its loss."""
    trained: list[int] = []
    entered = [0] * epoch.size
    before = epoch._replace(changes=())
    for number, change in enumerate(epoch.changes, start=1):
        for rank, share in enumerate(shares(length, before)):
            if rank not in change.stays:
                trained += share[entered[rank] : change.trained].tolist()
        entered = [entered[rank] for rank in change.stays]
        entered += [change.trained] * (change.size - len(change.stays))
        before = epoch._replace(changes=epoch.changes[:number])
    for rank, share in enumerate(shares(length, before)):
        trained += share[entered[rank] :].tolist()
    assert set(trained) <= set(range(length))
    return [trained.count(position) for position in range(length)]


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
    counts = Counter(replay(length, epoch))
    assert set(counts) <= {0, 1}
    assert counts[0] < size
    assert len({len(share) for share in shares(length, epoch)}) == 1


def made(rank: int, size: int, length: int = 24) -> Samples:
    samples = Samples(length, lambda _: torch.arange(length))
    samples.rank, samples.size = rank, size
    return samples


def resume(members: Sequence[Samples], positions: Sequence[Position], stays: tuple[int, ...]) -> None:
    """Gives ranks in their order, and lets all go on."""
    for rank, member in enumerate(members):
        member.change(positions, stays, rank, len(members))
        member.thaw()


def test_members_that_stay_go_on_and_share_what_the_lost_one_leaves() -> None:
    members = [made(rank, 3) for rank in range(3)]
    draws = [member.begin(0, 0) for member in members]
    trained: list[int] = []
    for step in range(2):
        for member, draw in zip(members, draws, strict=True):
            trained += islice(draw, 2)
            member.exchanged(step)
    kept = [list(islice(draws[rank], 2)) for rank in (0, 2)]
    next(draws[1])  # this member is lost within the third step
    positions = [members[rank].freeze(2) for rank in (0, 2)]
    assert [(one.trained, one.drawn) for one in positions] == [(4, 6), (4, 6)]
    resume((members[0], members[2]), positions, (0, 2))
    rest = [list(draws[rank]) for rank in (0, 2)]
    assert sorted([*trained, *kept[0], *kept[1], *rest[0], *rest[1]]) == list(range(24))


def test_a_member_that_has_all_means_counts_the_step_before_it_uses_them() -> None:
    member = made(0, 2)
    draw = member.begin(0, 0)
    for step in range(2):
        list(islice(draw, 3))
        member.exchanged(step)
    list(islice(draw, 3))
    assert member.freeze(2).trained == 6
    assert member.freeze(3).trained == 9  # the third exchange is complete


def test_the_rest_of_the_last_batch_is_drawn_after_the_end() -> None:
    members = [made(rank, 2, 10) for rank in range(2)]
    draws = [member.begin(0, 0) for member in members]
    for draw, member in zip(draws, members, strict=True):
        list(islice(draw, 3))
        member.exchanged(0)
    assert [list(islice(draw, 3)) for draw in draws] == [[6, 8], [7, 9]]  # a smaller batch, and the end
    position = members[0].freeze(1)
    resume(members[:1], [position], (0,))
    assert list(islice(draws[0], 3)) == [7, 9]


def test_all_members_end_a_batch_where_one_has_ended_its_share() -> None:
    """One member has its smaller last batch, the other one draws it later, and a newcomer counts them."""
    members, newcomer = [made(rank, 3, 20) for rank in range(3)], made(2, 3, 20)
    draws = [member.begin(0, 0) for member in members]
    for draw, member in zip(draws, members, strict=True):
        list(islice(draw, 4))
        member.exchanged(0)
    batches = [[list(islice(draws[0], 4))], []]
    assert batches[0] == [[12, 15]]
    positions = [member.freeze(1) for member in members[:2]]
    resume(members[:2], positions, (0, 1))
    for place, draw in enumerate(draws[:2]):
        while batch := list(islice(draw, 4)):
            batches[place].append(batch)
    assert [[len(batch) for batch in each] for each in batches] == [[2, 2], [2, 2]]
    newcomer.follow(members[0].history, 3)
    counted = newcomer.begin(0, 0)
    assert [len(list(islice(counted, 4))) for _ in range(4)] == [4, 2, 2, 0]


def test_samples_drawn_ahead_are_kept_by_those_that_stay() -> None:
    """A loader with processes draws batches ahead."""
    member = made(0, 2, 40)
    draw = member.begin(0, 0)
    list(islice(draw, 6))  # two batches ahead of the first
    member.exchanged(0)
    list(islice(draw, 2))
    member.exchanged(1)
    position = member.freeze(2)
    assert (position.trained, position.drawn, position.per_step) == (4, 8, 2)


def test_a_newcomer_counts_and_then_takes_its_part() -> None:
    member, newcomer = made(0, 1), made(1, 2)
    draw = member.begin(0, 0)
    first = list(islice(draw, 4))
    member.exchanged(0)
    list(islice(draw, 4))
    member.exchanged(1)
    position = member.freeze(2)
    newcomer.follow(member.history, 2)
    resume((member, newcomer), [position], (0,))
    assert newcomer.count(0) == 8 + 8
    its = list(newcomer.begin(0, 0))
    assert its[:4] == first
    assert sorted([*its, *draw]) == list(range(24))


def test_every_iteration_begins_with_the_current_members() -> None:
    member = made(0, 2)
    assert len(list(member.begin(0, 0))) == 12
    resume([member], [member.freeze(0)], (0,))
    assert len(list(member.begin(1, 0))) == 24

"""A ring that heals: members are lost and enter, and training takes the steps of those that are there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn

from hubring.ps.core.errors import ConfigError, HubringError, RingBroken
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.collectives import allgather, allreduce, allreduce_async, broadcast, new_group
from hubring.workers.communicators.ring import group, process_group
from hubring.workers.communicators.ring.communicator import AllreduceCommunicator
from hubring.workers.communicators.ring.healing.generations import Agreed, RingMeeting
from hubring.workers.communicators.ring.healing.healing_ring import MOST_ATTEMPTS, HealingRing
from hubring.workers.communicators.ring.process_group import Ring
from hubring.workers.communicators.ring.results import CallResults
from hubring.workers.communicators.ring.work import Operations, RingWork
from hubring.workers.optimizer import entering
from hubring.workers.optimizer.distributed import DistributedOptimizer
from hubring.workers.optimizer.entering import give_states
from tests.contract.models import attached, squares
from tests.reports.training import momentum, take, values
from tests.support.fakes.nccl import FakeNccl
from tests.support.processes.stopwatch import until
from tests.support.training.healing import HealingRanks, together
from tests.support.training.ranks import LIMIT

pytestmark = pytest.mark.slow


@pytest.fixture(params=["shm", "gloo", pytest.param("nccl that hangs", marks=pytest.mark.full)], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in loses members as NCCL does. `make test` has it where a loss is all that happens."""
    monkeypatch.setattr(HealingRanks, "backend", request.param.split()[0])
    monkeypatch.setattr(FakeNccl, "hangs", request.param == "nccl that hangs")
    monkeypatch.setattr(group, "open_nccl", FakeNccl)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)


def exchange(ring: HealingRing, buckets: list[Bucket], step: int, value: float) -> list[float]:
    """Takes a step with this gradient; returns each bucket's mean."""
    for bucket in buckets:
        bucket.gradients.fill_(value)
    for work in [ring.push_pull(bucket, {"step": float(step)}) for bucket in buckets]:
        work.wait(LIMIT)
    means = [float(bucket.gradients[0]) for bucket in buckets]
    ring.between_steps(step + 1)
    return means


BACKENDS = pytest.mark.parametrize(
    "backend", ["shm", "gloo", "nccl that hangs", "nccl that ends"], indirect=True
)


@BACKENDS
def test_the_step_of_a_lost_member_is_taken_without_it() -> None:
    ranks = HealingRanks(3)

    def live(ring: HealingRing) -> Any:
        own, buckets = ring.rank, attached(ring)
        ring._attempts = MOST_ATTEMPTS  # as after many losses
        means = []
        for step in range(6):
            if (own, step) == (1, 3):
                buckets[0].gradients.fill_(100.0)
                ring.push_pull(buckets[0], {"step": 3.0})  # one bucket of several
                return ranks.lose(1)
            means.append(exchange(ring, buckets, step, 1.0 + own))
        ring.hear(1, newcomers=False)  # a late report
        return means, ring.rank, ring.size, ring._breaks

    first, _, last = together(ranks, live)
    expected = [[2.0] * 2] * 3 + [[2.0] * 2] * 3
    assert first == (expected, 0, 2, False)
    assert last == (expected, 1, 2, False)


@BACKENDS
def test_members_that_lack_a_result_get_it_from_one_that_has_it() -> None:
    """Members 0 and 1 complete a step; member 2 has not seen its end when member 1 is lost."""
    ranks = HealingRanks(3)
    done, lost = threading.Barrier(3, timeout=LIMIT), threading.Event()

    def live(ring: HealingRing) -> Any:
        own, (bucket, *_) = ring.rank, attached(ring)
        assert exchange(ring, [bucket], 0, 1.0 + own) == [2.0]
        bucket.gradients.fill_(1.0 + own)
        work = ring.push_pull(bucket, {"step": 1.0})
        if own < 2:
            work.wait(LIMIT)
        done.wait()
        if own == 1:
            ranks.lose(1)
            return lost.set()
        lost.wait(LIMIT)
        if own == 2:
            work.wait(LIMIT)
        mean = float(bucket.gradients[0])
        return mean, exchange(ring, [bucket], 2, 1.0 + own)

    assert together(ranks, live) == [(2.0, [2.0]), None, (2.0, [2.0])]


def test_collectives_are_run_again_among_those_that_are_left() -> None:
    ranks = HealingRanks(3)

    def live(ring: HealingRing) -> Any:
        own = ring.rank
        assert allreduce(torch.ones(1), communicator=ring).item() == 1.0
        if own == 1:
            return ranks.lose(1)
        rows = allgather(torch.tensor([own]), communicator=ring).tolist()
        with pytest.raises(RingBroken, match="its root, rank 1, is lost"):
            broadcast(torch.ones(1), 1, communicator=ring)
        ring.between_steps(1)
        return rows, broadcast(torch.tensor([own]), 1, communicator=ring).tolist(), ring.size

    first, _, last = together(ranks, live)
    assert first == last == ([0, 2], [2], 2)


def test_a_collective_that_is_called_while_the_members_change_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, connect = HealingRanks(3), RingMeeting.connect

    def connects(meeting: RingMeeting, agreed: Agreed, results: CallResults) -> AllreduceCommunicator:
        if agreed.number > 1:
            until(lambda: bool(ranks.rings[meeting.identity]._calls._pending))
        return connect(meeting, agreed, results)

    monkeypatch.setattr(RingMeeting, "connect", connects)

    def live(ring: HealingRing) -> Any:
        if ring.rank == 1:
            ranks.lose(1)
            return ranks.beat()
        until(lambda: ring._calls._ring is None)
        return allreduce(torch.ones(1), communicator=ring).item()

    assert together(ranks, live) == [1.0, None, 1.0]


def test_a_result_counts_though_the_members_change_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise member 2 would run its first call again, with the others' second one."""
    ranks, note = HealingRanks(3), CallResults.note

    def notes(results: CallResults, *given: Any) -> None:
        note(results, *given)
        ring = ranks.rings[2]
        if ring._results is results and ring.generation == 1:
            until(lambda: ring._calls._ring is None)

    monkeypatch.setattr(CallResults, "note", notes)

    def live(ring: HealingRing) -> Any:
        own = ring.rank
        means = [allreduce(torch.tensor([float(own)]), name="mean", communicator=ring).item()]
        if own == 1:
            ranks.lose(1)
            return ranks.beat()
        return [*means, allreduce(torch.tensor([10.0 + own]), name="mean", communicator=ring).item()]

    assert together(ranks, live) == [[1.0, 11.0], None, [1.0, 11.0]]


def test_a_group_ends_with_the_members_that_made_it() -> None:
    ranks, made = HealingRanks(3), threading.Barrier(3, timeout=LIMIT)

    def live(ring: HealingRing) -> Any:
        own = ring.rank
        group = new_group([0, 2], communicator=ring)
        made.wait()
        if own == 1:
            return ranks.lose(1)
        allreduce(torch.ones(1), communicator=ring)  # ends in the next generation
        with pytest.raises(RingBroken, match="make a new group"):
            allreduce(torch.ones(1), group=group, communicator=ring)
        return True

    assert together(ranks, live) == [True, None, True]


def test_a_leaving_member_fails_no_slower_ones_last_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Member 0 leaves while member 1, which watches it, has not yet noticed the end of the confirmation."""
    monkeypatch.setattr(process_group, "LEAVE_SECONDS", LIMIT)
    ranks, at_last = HealingRanks(3), threading.Event()
    leaving, left = threading.Event(), threading.Event()
    close, end = Ring.close, Operations.end

    def closes(ring: Ring) -> None:
        first = ring.rank == 0 and ring._witness is not None
        if first:
            leaving.set()
        close(ring)
        if first:
            left.set()

    def ends(operations: Operations, work: RingWork) -> None:
        if work.what == "a confirmation" and operations._rank == 1 and at_last.is_set():
            assert leaving.wait(LIMIT)
            left.wait(0.2)
        end(operations, work)

    monkeypatch.setattr(Ring, "close", closes)
    monkeypatch.setattr(Operations, "end", ends)

    def live(ring: HealingRing) -> Any:
        own, (bucket, *_) = ring.rank, attached(ring)
        assert exchange(ring, [bucket], 0, 1.0 + own) == [2.0]
        if own == 1:
            at_last.set()
        return exchange(ring, [bucket], 1, 1.0 + own), ring.generation

    assert together(ranks, live) == [([2.0], 1)] * 3


STEPS = 8


def small(seed: int) -> nn.Module:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(seed)
    model.register_buffer("count", torch.zeros(1))
    return model


def trained(
    ranks: HealingRanks, ring: HealingRing, give: Callable[..., object] = give_states
) -> tuple[int, list[int], list[torch.Tensor]]:
    """Trains all steps, the third one once a newcomer waits.

    Returns:
        The step in which the member entered, the members after each step since, and parameters.
    """
    model = small(int(ring.late))
    optimizer = DistributedOptimizer(momentum(model), model, communicator=ring)
    entered, sizes = optimizer.completed_steps, []
    ranks.release()
    while optimizer.completed_steps < STEPS:
        if optimizer.completed_steps == 2:
            ranks.await_newcomer()
        take(optimizer, squares(model, optimizer.completed_steps, ring.rank))
        if ring.between_steps(optimizer.completed_steps):
            give(ring, [optimizer])
        sizes.append(ring.size)
    return entered, sizes, values(model)


def test_a_newcomer_gets_the_state_and_all_go_on_alike() -> None:
    ranks = HealingRanks(2)
    results = together(ranks, lambda ring: trained(ranks, ring), 2)
    entered = results[2][0]
    assert 0 < entered < STEPS
    assert results[0][1] == [2] * (entered - 1) + [3] * (STEPS - entered + 1)
    reference = small(0)
    optimizer = momentum(reference)
    for step in range(STEPS):
        optimizer.zero_grad()
        size = 2 if step < entered else 3
        torch.stack([squares(reference, step, rank) for rank in range(size)]).mean().backward()
        optimizer.step()
    for _, _, ended in results:
        torch.testing.assert_close(ended, values(reference))


def ends_of_three(ranks: HealingRanks, lost: int, give: Callable[..., object] = give_states) -> None:
    """Three members train with a newcomer, and one of the four is lost meanwhile: all others end alike."""

    def live(ring: HealingRing) -> Any:
        own = 3 if ring.late else ring.rank
        try:
            return trained(ranks, ring, give)
        except RingBroken:
            assert own == lost
            return None

    ended = [result for result in together(ranks, live, 3) if result is not None]
    assert [sizes[-1] for _, sizes, _ in ended] == [3, 3, 3]
    for _, _, others in ended[1:]:
        torch.testing.assert_close(others, ended[0][2], rtol=0, atol=0)


def test_the_next_member_gives_the_state_if_the_first_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = HealingRanks(3)
    real = entering._broadcast

    def broadcast(whole: torch.Tensor | None, communicator: HealingRing) -> torch.Tensor:
        if whole is not None and 0 in ranks.live:
            ranks.lose(0)
        return real(whole, communicator)

    monkeypatch.setattr(entering, "_broadcast", broadcast)
    ends_of_three(ranks, lost=0)


@pytest.mark.parametrize("lost", [0, 3], ids=["first", "newcomer"])
def test_members_that_could_not_connect_to_newcomers_give_the_state_too(
    lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Member 1 sees the newcomer's generation break when member 2 goes on in it already."""
    ranks, opened = HealingRanks(3), threading.Event()
    broken: list[int] = []
    real = RingMeeting.connect

    def connect(meeting: RingMeeting, agreed: Agreed, results: CallResults) -> AllreduceCommunicator:
        ring = real(meeting, agreed, results)
        if meeting.identity == 1 and len(agreed.members) > 3 and not broken:
            broken.append(agreed.number)
            assert opened.wait(LIMIT)
            ranks.lose(lost)
            error = RingBroken("a member was lost while it connected")
            ring.abort(error)
            raise error
        return ring

    def give(ring: HealingRing, optimizers: list[DistributedOptimizer]) -> None:
        if ring.rank == 2:
            opened.set()
        give_states(ring, optimizers)

    monkeypatch.setattr(RingMeeting, "connect", connect)
    ends_of_three(ranks, lost, give)


def test_a_newcomer_with_another_model_is_refused_and_the_others_go_on() -> None:
    ranks = HealingRanks(2)

    def live(ring: HealingRing) -> Any:
        if ring.late:
            model: nn.Module = nn.Linear(5, 2)
            with pytest.raises(ConfigError, match=r"the ring trains another model: 'weight'"):
                DistributedOptimizer(momentum(model), model, communicator=ring)
            return ranks.lose(2)
        return trained(ranks, ring)[1][-1]

    assert together(ranks, live, 2) == [2, 2, None]


def test_many_members_are_lost_one_after_another() -> None:
    ranks = HealingRanks(6)

    def live(ring: HealingRing) -> Any:
        own, buckets = ring.rank, attached(ring)
        for step in range(12):
            if own and step == 2 * own:
                return ranks.lose(own)
            exchange(ring, buckets, step, 1.0)
        return ring.size, ring.generation

    assert together(ranks, live)[0] == (1, 6)


def test_a_sampler_that_is_made_after_a_loss_deals_as_those_made_before() -> None:
    ranks, drawn = HealingRanks(3), threading.Event()

    def live(ring: HealingRing) -> Any:
        own, began = ring.rank, list[int]()
        if own == 0:
            draws = ring.deal(12, lambda _: torch.arange(12)).begin(0, 0)
            began = list(islice(draws, 3))
            drawn.set()
        assert drawn.wait(LIMIT)
        if own == 2:
            return ranks.lose(2)
        allreduce(torch.ones(1), communicator=ring)
        if own == 1:
            draws = ring.deal(12, lambda _: torch.arange(12)).begin(0, 0)
        return began + list(draws)

    first, second, _ = together(ranks, live)
    assert sorted([*first, *second]) == list(range(12))


def test_works_end_with_the_error_of_a_job_that_failed() -> None:
    ranks, failed = HealingRanks(2), threading.Event()

    def live(ring: HealingRing) -> Any:
        if ring.rank == 1:
            failed.wait(LIMIT)
            return
        work = allreduce_async(torch.ones(1), communicator=ring)
        ring.fail(HubringError("too few are left"))
        with pytest.raises(HubringError, match="too few are left"):
            work.wait(LIMIT)
        failed.set()

    together(ranks, live)

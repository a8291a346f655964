"""A standby's store after its primary's is gone, at any moment of any schedule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hubring.ps.core.messages import (
    Call,
    Code,
    Coded,
    Collective,
    CollectiveResult,
    Contribute,
    Delivery,
    Push,
    ReduceOp,
    Refusal,
)
from hubring.ps.core.types import (
    BucketSpec,
    DtypeAndShape,
    HyperTable,
    Member,
    Sender,
    Slice,
    StepHyper,
    TensorSpec,
    View,
)
from hubring.ps.optim.hyperparameters import hyper_of
from hubring.ps.store.consistency import ASP, BSP, SSP, BackupWorkers, Consistency
from tests.support.replicated import Gradient, Pair
from tests.support.store import ADD, MOMENTUM, coded

RANKS, STEPS, KEYS = 3, 4, 2
SLOTS = RANKS * STEPS
ADAM = hyper_of(
    torch.optim.Adam([torch.zeros(1)], lr=0.1, betas=(0.9, 0.99), eps=1e-4, weight_decay=0.1).param_groups[0],
    "Adam",
)

Schedule = list[tuple[int, int]]
SCHEDULES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)), max_size=150)


def bucket(numel: int, optimizer: str = "SGD", dtype: str = "float32", codec: str = "") -> BucketSpec:
    tensors = tuple(TensorSpec(f"w{at}", (numel // KEYS // 2,)) for at in range(2 * KEYS))
    return BucketSpec(0, dtype, optimizer, tensors, codec)


def noise(numel: int, dtype: torch.dtype = torch.float32) -> Callable[[int, int, int], Tensor]:
    def gradient(rank: int, pushed: int, key: int) -> Tensor:
        generator = torch.Generator().manual_seed(97 * pushed + 7 * key + rank)
        return torch.randn(numel, generator=generator).to(dtype)

    return gradient


def slot(rank: int, pushed: int, key: int) -> Tensor:
    gradient = torch.zeros(SLOTS)
    gradient[rank * STEPS + pushed] = 1.0
    return gradient


def pair(consistency: Consistency, spec: BucketSpec, gradient: Gradient, hyper: StepHyper) -> Pair:
    numel = spec.numel // KEYS
    slices = [Slice(key, 0, key * numel, numel, 0) for key in range(KEYS)]
    return Pair(consistency, RANKS, STEPS, slices, spec, gradient, hyper)


def play(world: Pair, schedule: Schedule) -> None:
    for action, argument in schedule:
        if action < 4:
            world.send(argument % RANKS, argument % KEYS)
        elif action < 7:
            world.carry(argument)
        else:
            world.follow(argument % 4)


KINDS = [
    ("SGD", "float32", "", MOMENTUM),
    ("SGD", "bfloat16", "", MOMENTUM),
    ("Adam", "float32", "", ADAM),
    ("Adam", "bfloat16", "", ADAM),
    ("Adam", "float16", "", ADAM),
    ("SGD", "float32", "int8", MOMENTUM),
    ("SGD", "float32", "", HyperTable((MOMENTUM, {**MOMENTUM, "lr": 0.3}), (0, 1))),
    ("SGD", "float32", "int8", HyperTable((MOMENTUM, {**MOMENTUM, "lr": 0.3}), (0, 1))),
    ("", "float32", "", {}),
    ("", "float16", "", {}),
    ("", "float32", "topk:0.25", {}),
]


@pytest.mark.slow
@settings(deadline=None, max_examples=8)
@pytest.mark.parametrize(("optimizer", "dtype", "codec", "hyper"), KINDS)
@given(earlier=SCHEDULES, schedule=SCHEDULES)
def test_lockstep_ends_in_the_same_bits_wherever_the_primary_is_lost(
    optimizer: str, dtype: str, codec: str, hyper: StepHyper, earlier: Schedule, schedule: Schedule
) -> None:
    spec = bucket(KEYS * 64, optimizer, dtype, codec)
    plain = noise(64, getattr(torch, dtype))

    def gradient(rank: int, pushed: int, key: int) -> Tensor | Coded:
        tensor = plain(rank, pushed, key)
        return coded(tensor, codec) if codec else tensor

    calm, disturbed = (pair(BSP(), spec, gradient, hyper) for _ in range(2))
    calm.finish()
    play(disturbed, earlier)
    disturbed.succeed()
    play(disturbed, schedule)
    disturbed.cut()
    disturbed.finish()
    for key in range(KEYS):
        ours, theirs = calm.parameters(key), disturbed.parameters(key)
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.sampled_from([BSP(), ASP(), SSP(0), SSP(2)]), SCHEDULES, st.booleans(), SCHEDULES)
def test_each_push_counts_once_wherever_the_primary_is_lost(
    consistency: Consistency, earlier: Schedule, succeeds: bool, schedule: Schedule
) -> None:
    world = pair(consistency, bucket(KEYS * SLOTS), slot, ADD)
    play(world, earlier)
    if succeeds:
        world.succeed()
    play(world, schedule)
    world.cut()
    world.finish()
    share = 1 / RANKS if consistency.lockstep else 1.0
    for key in range(KEYS):
        torch.testing.assert_close(world.parameters(key), torch.full((SLOTS,), share))


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(SCHEDULES, SCHEDULES)
def test_with_backup_workers_no_push_counts_twice_and_no_round_is_lost(
    earlier: Schedule, schedule: Schedule
) -> None:
    world = pair(BackupWorkers(1), bucket(KEYS * SLOTS), slot, ADD)
    play(world, earlier)
    world.succeed()
    play(world, schedule)
    seen = [dict(worker.values) for worker in world.workers]
    world.cut()
    world.finish()
    for key in range(KEYS):
        values = world.parameters(key)
        shares = {round(value, 4) for value in values.tolist()}
        assert shares <= {0.0, 1.0, 0.5, round(1 / 3, 4)}
        for worker in seen:
            if key in worker:
                assert bool((values >= worker[key]).all()), "what a worker has seen is lost"


def test_a_late_worker_goes_on_after_its_first_read_at_a_primary_with_a_new_standby() -> None:
    world = pair(BackupWorkers(1), bucket(KEYS * SLOTS), slot, ADD)
    for rank in (0, 1, 0, 1):  # both pull, then both push: a round closes without rank 2
        world.send(rank, 0)
        world.carry(0)
        world.follow(0)
    world.succeed()
    world.send(2, 0)
    world.carry(0)
    world.follow(0)
    assert world.workers[2].clocks == {0: 1}
    world.cut()
    world.finish()


@pytest.mark.slow
def test_large_slices_step_in_the_same_bits_on_both() -> None:
    numel = 1 << 20  # more than one block
    spec = bucket(KEYS * numel, "Adam")
    world = pair(BSP(), spec, noise(numel), ADAM)
    world.finish()
    for key in range(KEYS):
        ours = world.parameters(key)
        assert world.standby.capture_at(None)
        theirs = (world.standby.captured() or {})[key]
        assert torch.equal(ours, theirs.values)


@pytest.mark.parametrize("succeeds", [False, True])
def test_open_collectives_close_on_the_standby_and_closed_ones_are_answered_again(succeeds: bool) -> None:
    world = pair(BSP(), bucket(KEYS * SLOTS), slot, ADD)
    call = Call(Collective.ALLREDUCE, "sum", ReduceOp.SUM, layouts=(DtypeAndShape("float32", (1,)),))

    def part(rank: int, sequence: int) -> Contribute:
        tensor = torch.tensor([float(10**rank)])
        return Contribute(Sender(rank, rank + 1), sequence, call, (tensor,))

    for rank in range(RANKS):
        world.primary.handle(part(rank, 1), rank)
    world.primary.handle(part(0, 2), "open")
    if succeeds:
        world.succeed()
    world.follow(len(world.recorder.sent))
    assert world.standby.handle(part(2, 1), "again") == [
        Delivery("again", CollectiveResult((torch.tensor([111.0]),)))
    ]
    answers = [answer for rank in range(RANKS) for answer in world.standby.handle(part(rank, 2), rank)]
    assert {ticket for ticket, _ in answers} == {None, *range(RANKS)}


def test_a_worker_that_the_primary_lost_is_fenced_by_the_standby() -> None:
    world = pair(BSP(), bucket(KEYS * SLOTS), slot, ADD)
    world.change(lambda store: store.on_view(View(9, (Member(0, 1), Member(1, 2)))))
    world.follow(len(world.recorder.sent))
    ((_, reply),) = world.standby.handle(Push(Sender(2, 3), 0, 0, slot(2, 0, 0), ADD), "late")
    assert isinstance(reply, Refusal)
    assert reply.code is Code.FENCED

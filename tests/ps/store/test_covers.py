"""A push that is the sum of several workers' gradients counts for all of them, and no gradient counts twice.

`test_store_schedules` has any schedule of covers, fallbacks and losses.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hubring.ps.core.messages import Code, Pull, Push
from hubring.ps.core.types import MAX_WORLD_SIZE
from hubring.ps.store.consistency import ASP, BSP, BackupWorkers, Consistency
from tests.support.replicated import Recorder
from tests.support.store import (
    ADD,
    MOMENTUM,
    answered,
    coded_push,
    decoded,
    hub,
    parameters,
    push,
    refusal_of,
    sender,
    snapshot_of,
    state,
    tensor_of,
    values_of,
    view,
    write,
)


def summed(rank: int, clock: int, value: float, *covered: int) -> Push:
    """The push of a sum, each element of which is `value`."""
    return replace(push(rank, clock, torch.full((4,), value)), covers=tuple(map(sender, covered)))


def test_a_sum_counts_for_each_worker_in_it() -> None:
    store = hub(BSP(), 4)
    assert store.handle(summed(0, 0, 3.0, 1, 2), "sum") == []
    deliveries = store.handle(push(3, 0, torch.full((4,), 5.0)), "own")
    assert answered(deliveries) == ["sum", "own"]
    assert parameters(store).tolist() == [2.0] * 4
    assert (store.stats().pushes, len(store.stats().partial), dict(store.stats().staleness)) == (4, 0, {0: 4})
    ((_, again),) = store.handle(push(2, 0), "late")
    assert (values_of(again).clock, tensor_of(again).tolist()) == (1, [2.0] * 4)
    assert store.handle(push(2, 1), "next") == []


@pytest.mark.parametrize("first", [True, False], ids=["before the sum", "after the sum"])
def test_the_own_push_of_a_covered_worker_waits_and_is_not_added(first: bool) -> None:
    store = hub(BSP(), 3)
    own, whole = (push(1, 0, torch.full((4,), 100.0)), "own"), (summed(0, 0, 3.0, 1), "sum")
    for request, ticket in (own, whole) if first else (whole, own):
        assert store.handle(request, ticket) == []
    assert answered(store.handle(push(2, 0, torch.full((4,), 6.0)), "other")) == ["sum", "own", "other"]
    assert parameters(store).tolist() == [3.0] * 4
    assert store.stats().pushes == 3


@pytest.mark.parametrize("first", [True, False], ids=["pushed before", "pushes after"])
def test_a_lost_worker_takes_its_sum_along_and_own_pushes_count(first: bool) -> None:
    store = hub(BSP(), 3)
    own = push(1, 0, torch.full((4,), 4.0))
    if first:
        assert store.handle(own, "own") == []
    assert store.handle(summed(0, 0, 100.0, 1), "sum") == []
    assert answered(store.on_view(view(2, sender(1), sender(2)))) == ["sum"]
    if not first:
        assert store.handle(own, "own") == []
    deliveries = store.handle(push(2, 0, torch.full((4,), 2.0)), "other")
    assert answered(deliveries) == ["own", "other"]
    assert parameters(store, 1).tolist() == [3.0] * 4


def test_a_sum_does_not_count_for_the_next_worker_of_a_rank() -> None:
    store, newcomer = hub(BSP(), 3), sender(1, 2)
    store.handle(summed(0, 0, 3.0, 1), "sum")
    store.on_view(view(2, sender(0), newcomer, sender(2)))
    assert store.handle(push(2, 0, torch.full((4,), 4.0)), "other") == []
    assert answered(store.handle(Push(newcomer, 0, 0, torch.full((4,), 5.0), ADD), "new")) == [
        "sum",
        "new",
        "other",
    ]
    assert parameters(store).tolist() == [3.0] * 4  # the lost worker's gradient is in the sum: 12 / 4


@pytest.mark.parametrize(
    ("consistency", "covers", "words"),
    [
        (BSP(), (0,), "each once"),
        (BSP(), (1, 1), "each once"),
        (BSP(), (MAX_WORLD_SIZE,), f"below {MAX_WORLD_SIZE}"),
        (BSP(), (2,), "another push of this step has some of them already"),
        (BSP(), (3,), "another push of this step has some of them already"),
        (ASP(), (1,), "only --mode bsp"),
        (BackupWorkers(1), (1,), "only --mode bsp"),
    ],
)
def test_a_sum_that_cannot_count_is_refused(
    consistency: Consistency, covers: tuple[int, ...], words: str
) -> None:
    store = hub(consistency, 4)
    if consistency.stable:
        assert store.handle(summed(3, 0, 2.0, 2), "other") == []
    refusal = refusal_of(store.handle(summed(0, 0, 2.0, *covers), "sum"))
    assert refusal.code is Code.BAD_REQUEST
    assert words in refusal.text
    assert str(list(covers)) in refusal.text


def test_values_may_change_before_a_covered_worker_reads_again() -> None:
    """So its shared memory must not show them."""
    store = hub(BSP(), 3)
    ((_, before),) = store.handle(Pull(sender(1), 0), "pull")
    store.handle(summed(0, 0, 3.0, 1), "sum")
    ((_, after),) = store.handle(Pull(sender(1), 0), "pull")
    assert (values_of(before).stable, values_of(after).stable) == (True, False)


def test_a_compressed_sum_is_divided_by_its_workers() -> None:
    store = hub(BSP(), 3, numel=64, optimizer="", codec="bf16")
    whole = replace(coded_push(0, 0, torch.full((64,), 2.0), name="bf16"), covers=(sender(1),))
    store.handle(whole, "sum")
    _, (_, reply) = store.handle(coded_push(2, 0, torch.full((64,), 4.0), name="bf16"), "other")
    assert decoded(values_of(reply).values).tolist() == [2.0] * 64


def test_workers_in_a_sum_must_agree_on_what_their_scripts_wrote() -> None:
    store = hub(BSP(), 3)
    for rank in range(3):
        store.handle(write(rank, 0, 7.0 + (rank == 1)), rank)
    store.handle(summed(0, 0, 3.0, 1), "sum")
    (_, refusal), *_ = store.handle(push(2, 0), "other")
    assert "ranks 0 and 1 have different parameters" in str(refusal)


def test_a_standby_knows_whose_gradients_a_sum_had() -> None:
    (primary, standby), recorder = (hub(BSP(), 3) for _ in range(2)), Recorder()
    primary.replicate(recorder)
    for clock in range(3):
        gradient = torch.arange(4.0) + clock
        primary.handle(Push(sender(2), 0, clock, gradient, MOMENTUM), "other")
        whole = Push(sender(0), 0, clock, 3 * gradient, MOMENTUM, covers=(sender(1),))
        primary.handle(whole, "sum")
    for change in recorder.sent:
        change(standby)
    assert snapshot_of(standby)[0].clocks == snapshot_of(primary)[0].clocks == {0: 3, 1: 3, 2: 3}
    assert torch.equal(parameters(standby), parameters(primary))
    assert state(standby) == state(primary)
    assert primary.stats().staleness == standby.stats().staleness == {0: 9}
    ((_, again),) = standby.handle(push(1, 2), "own")
    assert values_of(again).clock == 3

"""Workers that come, die and leave, the end of a job, and what a shard refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hubring.ps.core.counters import PartialRounds, Stats
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import (
    Call,
    Code,
    Collective,
    Contribute,
    Delivery,
    Init,
    Pull,
    Push,
    Refusal,
    Request,
)
from hubring.ps.core.types import Sender, Slice
from hubring.ps.store.consistency import ASP, BSP, SSP
from hubring.ps.store.store import KVStore
from tests.support.store import (
    ADD,
    answered,
    bucket,
    hub,
    parameters,
    push,
    refusal_of,
    sender,
    values_of,
    view,
)


def test_the_push_of_a_dead_worker_is_discarded_and_its_retries_are_refused() -> None:
    store = hub(BSP(), 3)
    store.handle(push(1, 0, torch.full((4,), 99.0)), "b")
    store.handle(push(0, 0), "a")
    assert refusal_of(store.on_view(view(2, sender(0), sender(2)))).code is Code.FENCED
    refusal = refusal_of(store.handle(push(1, 0), "zombie"))
    assert refusal.code is Code.FENCED
    assert "rank 1 (join 0) is not a member at epoch 2" in refusal.text
    assert answered(store.handle(push(2, 0), "c")) == ["a", "c"]
    assert parameters(store).tolist() == [1.0] * 4


def test_a_joiner_starts_at_the_slowest_live_clock_in_asynchronous_modes() -> None:
    store = hub(ASP(), 3)
    for rank, clocks in ((0, 5), (1, 3), (2, 1)):
        for clock in range(clocks):
            store.handle(push(rank, clock), rank)
    late = sender(2, life=2)
    store.on_view(view(2, sender(0), sender(1), late))
    ((_, pulled),) = store.handle(Pull(late, 0), "pull")
    assert values_of(pulled).clock == 3
    assert refusal_of(store.handle(push(2, 1), "old life")).code is Code.FENCED


def test_a_joiner_after_everybody_left_goes_on_where_they_were() -> None:
    store = hub(ASP(), 1)
    for clock in range(3):
        store.handle(push(0, clock), clock)
    store.on_view(view(2))
    late = sender(0, life=2)
    store.on_view(view(3, late))
    ((_, pulled),) = store.handle(Pull(late, 0), "pull")
    assert values_of(pulled).clock == 3


def test_workers_that_left_before_the_others_joined_block_no_reader() -> None:
    store = hub(SSP(0), 2)
    store.on_view(view(2))
    late = sender(0, life=2)
    store.on_view(view(3, late))
    for clock in range(3):
        assert answered(store.handle(Push(late, 0, clock, torch.ones(4), ADD), clock)) == [clock]


def test_an_older_view_that_comes_late_changes_nothing() -> None:
    store = hub(BSP(), 2)
    store.on_view(view(5, sender(0)))
    assert store.on_view(view(4, sender(0), sender(1))) == []
    assert refusal_of(store.handle(push(1, 0), "b")).code is Code.FENCED


def test_pushes_of_a_trial_are_dropped_with_its_plan() -> None:
    store = hub(BSP(), 2, optimizer="")
    store.handle(push(0, 0, hyper={}), "a")
    store.handle(push(1, 0, hyper={}), "b")
    store.on_view(view(2, sender(0)))
    store.handle(push(0, 1, hyper={}), "c")
    assert store.stats().pushes == 3
    store.assign([Slice(0, 0, 0, 4, 0)], [bucket(4)])
    assert store.stats() == Stats(keys=1)


def test_partial_rounds_are_recorded_as_runs() -> None:
    store = hub(BSP(), 2)
    store.handle(push(0, 0), 0)
    store.handle(push(1, 0), 1)
    store.on_view(view(2, sender(0)))
    for clock in (1, 2, 3):
        store.handle(push(0, clock), clock)
    assert list(store.stats().partial) == [PartialRounds(key=0, first=1, last=3, ranks=(0,))]


def test_a_pull_while_its_sender_contributes_promises_nothing() -> None:
    store = hub(BSP(), 2)
    ((_, before),) = store.handle(Pull(sender(0), 0), "before")
    store.handle(push(0, 0), "a")
    ((_, during),) = store.handle(Pull(sender(0), 0), "during")
    assert (values_of(before).stable, values_of(during).stable) == (True, False)


# The end.


def test_draining_in_lockstep_reaches_all_ranks_in_the_same_round() -> None:
    store = hub(BSP(), 2, keys=2)
    for rank in range(2):
        store.handle(push(rank, 0, key=1), rank)
    store.handle(push(0, 0), "a")
    store.drain()
    ((_, refreshed),) = store.handle(Pull(sender(1), 0), "refresh")
    assert not values_of(refreshed).drain
    assert [values_of(reply).drain for _, reply in store.handle(push(1, 0), "b")] == [True, True]
    store.handle(push(0, 1, key=1), "c")
    assert [values_of(reply).drain for _, reply in store.handle(push(1, 1, key=1), "d")] == [True, True]
    store.drain()
    assert values_of(store.handle(push(0, 0), "retry")[0].reply).drain


def test_draining_an_asynchronous_job_is_told_in_every_reply_from_now_on() -> None:
    store = hub(ASP(), 2)
    store.drain()
    assert values_of(store.handle(push(0, 0), "a")[0].reply).drain
    assert values_of(store.handle(Pull(sender(1), 0), "b")[0].reply).drain


# Requests that make no sense.


@pytest.mark.parametrize(
    ("request_", "code", "named"),
    [
        (push(0, 0, key=9), Code.UNKNOWN_KEY, "key 9 is not on this shard, which holds 1 keys from 0 to 0"),
        (push(0, 0, torch.ones(5)), Code.WRONG_SIZE, "key 0 expects float32[4], got float32[5]"),
        (push(0, 0, torch.ones(4, dtype=torch.float64)), Code.WRONG_SIZE, "float64[4]"),
        (Init(sender(0), 0, torch.ones(2, 2)), Code.WRONG_SIZE, "float32[2, 2]"),
        (push(0, 0, hyper={}), Code.BAD_REQUEST, "rank 0: SGD got"),
        (push(0, 0, hyper={**ADD, "lr": float("nan")}), Code.BAD_REQUEST, "lr=nan"),
        (Pull(Sender(7, 1), 0), Code.FENCED, "rank 7"),
        (Contribute(Sender(0, 99), 1, Call(Collective.BARRIER, "x")), Code.FENCED, "rank 0 (join 0)"),
    ],
)
def test_a_request_that_cannot_be_served_is_named_and_changes_nothing(
    request_: Request, code: Code, named: str
) -> None:
    store = hub(BSP(), 1)
    refusal = refusal_of(store.handle(request_, "odd"))
    assert refusal.code is code
    assert named in refusal.text
    assert answered(store.handle(push(0, 0), "fine")) == ["fine"]
    assert parameters(store).tolist() == [1.0] * 4


def test_buckets_that_the_hub_cannot_serve_are_refused_at_once() -> None:
    piece = Slice(0, 0, 0, 4, 0)
    with pytest.raises(ConfigError, match="does not support the optimizer LBFGS"):
        KVStore(BSP()).assign([piece], [bucket(4, "LBFGS")])
    with pytest.raises(ConfigError, match="bucket 0 has dtype int64; only floating"):
        KVStore(BSP()).assign([piece], [bucket(4, "SGD", "int64")])


FINISHED = "rank 0 finished after 1 steps, so no rank can take step 2"


def test_no_mean_is_made_without_a_worker_that_finished() -> None:
    store = hub(BSP(), 2, optimizer="")
    for rank in range(2):
        store.handle(push(rank, 0), f"step 1 of {rank}")
    deliveries = store.handle(push(1, 1), "step 2")
    deliveries += store.on_view(replace(view(2, sender(1)), finished=FINISHED))
    deliveries += store.handle(push(1, 1), "again")
    refused = [delivery for delivery in deliveries if isinstance(delivery.reply, Refusal)]
    assert refused == [Delivery(ticket, Refusal(Code.MISMATCH, FINISHED)) for ticket in ("step 2", "again")]


def test_a_hub_that_steps_goes_on_without_a_worker_that_finished() -> None:
    store = hub(BSP(), 2)
    store.on_view(replace(view(2, sender(1)), finished=FINISHED))
    (delivery,) = store.handle(push(1, 0), "step")
    assert values_of(delivery.reply).version == 1

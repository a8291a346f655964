"""One shard's state machine, fed with schedules of messages."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hubring.ps.compression.compressor import by_name
from hubring.ps.core.errors import CheckpointCorrupt, ConfigError
from hubring.ps.core.messages import (
    Call,
    Code,
    Coded,
    Collective,
    Contribute,
    Delivery,
    Init,
    Pull,
    Push,
    Refusal,
    Reply,
    Request,
    Result,
    Ticket,
    Values,
)
from hubring.ps.core.stats import Run, Stats
from hubring.ps.core.types import BucketSpec, Hyper, Layout, Member, Sender, Slice, TensorSpec, View
from hubring.ps.store.consistency import ASP, BSP, SSP, BackupWorkers, Consistency
from hubring.ps.store.entry import Contribution, Entry
from hubring.ps.store.store import KVStore

# The gradient of the ledger tensor is a one in the push's own slot: lr -1 adds it.
ADD: Hyper = {"lr": -1.0, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": 0, "maximize": 0}
MOMENTUM: Hyper = {**ADD, "lr": 0.1, "momentum": 0.9}


def bucket(numel: int, optimizer: str = "SGD", dtype: str = "float32", codec: str = "") -> BucketSpec:
    return BucketSpec(0, dtype, 0, optimizer, (TensorSpec("weight", (numel,)),), codec)


def sender(rank: int, life: int = 1) -> Sender:
    return Sender(rank, 100 * life + rank)


def view(epoch: int, *senders: Sender) -> View:
    return View(epoch, tuple(Member(*each) for each in sorted(senders)))


def hub(
    consistency: Consistency,
    workers: int,
    *,
    numel: int = 4,
    keys: int = 1,
    optimizer: str = "SGD",
    initialise: bool = True,
    codec: str = "",
) -> KVStore:
    store = KVStore(consistency)
    store.on_view(view(1, *map(sender, range(workers))))
    slices = [Slice(key, 0, key * numel, numel, 0) for key in range(keys)]
    store.assign(slices, [bucket(numel * keys, optimizer, codec=codec)])
    if initialise and optimizer:
        for key in range(keys):
            assert store.handle(Init(sender(0), key, torch.zeros(numel)), "init") == [
                Delivery("init", Result())
            ]
    return store


def push(rank: int, clock: int, gradient: Tensor | None = None, *, key: int = 0, hyper: Hyper = ADD) -> Push:
    return Push(sender(rank), key, clock, torch.ones(4) if gradient is None else gradient, hyper)


def values_of(reply: Reply) -> Values:
    assert isinstance(reply, Values), reply
    return reply


def tensor_of(reply: Reply) -> Tensor:
    values = values_of(reply).values
    assert isinstance(values, Tensor), values
    return values


def refusal_of(deliveries: list[Delivery]) -> Refusal:
    ((_, reply),) = deliveries
    assert isinstance(reply, Refusal), reply
    return reply


def answered(deliveries: Iterable[Delivery]) -> list[Ticket]:
    return [ticket for ticket, _ in deliveries]


def parameters(store: KVStore, rank: int = 0, key: int = 0) -> Tensor:
    ((_, reply),) = store.handle(Pull(sender(rank), key), "look")
    return tensor_of(reply).clone()


# The start.


def test_pulls_wait_for_the_first_values_and_a_second_init_is_ignored() -> None:
    store = hub(BSP(), 2, initialise=False)
    assert store.handle(Pull(sender(0), 0), "a") == []
    assert store.handle(Pull(sender(1), 0), "b") == []
    assert store.handle(Pull(sender(1), 0), "b again") == []
    deliveries = store.handle(Init(sender(0), 0, torch.full((4,), 7.0)), "init")
    assert answered(deliveries) == ["init", "a", "b", "b again"]
    assert values_of(deliveries[1].reply).clock == 0
    store.handle(Init(sender(1), 0, torch.zeros(4)), "late init")
    assert torch.equal(parameters(store), torch.full((4,), 7.0))


def test_a_push_before_the_first_values_is_refused() -> None:
    refusal = refusal_of(hub(BSP(), 1, initialise=False).handle(push(0, 0), "p"))
    assert refusal.code is Code.BAD_REQUEST
    assert "no values to update yet" in refusal.text


def test_an_averaging_hub_needs_no_first_values_and_returns_the_mean() -> None:
    store = hub(BSP(), 2, optimizer="")
    store.handle(push(0, 0, torch.full((4,), 2.0), hyper={}), "a")
    deliveries = store.handle(push(1, 0, torch.full((4,), 4.0), hyper={}), "b")
    assert torch.equal(tensor_of(deliveries[0].reply), torch.full((4,), 3.0))


# BSP.


def test_bsp_applies_the_mean_once_all_have_pushed_and_answers_everybody() -> None:
    store = hub(BSP(), 3)
    assert store.handle(push(2, 0, torch.full((4,), 6.0)), "c") == []
    assert store.handle(push(0, 0, torch.full((4,), 0.0)), "a") == []
    deliveries = store.handle(push(1, 0, torch.full((4,), 3.0)), "b")
    assert sorted(map(str, answered(deliveries))) == ["a", "b", "c"]
    for _, reply in deliveries:
        values = values_of(reply)
        assert (values.clock, values.version, values.staleness, values.drain, values.stable) == (
            1,
            1,
            0,
            False,
            True,
        )
        assert torch.equal(tensor_of(reply), torch.full((4,), 3.0))


def test_bsp_is_bitwise_the_same_for_every_order_of_arrival() -> None:
    def run(orders: Iterable[tuple[int, ...]]) -> Tensor:
        store = hub(BSP(), 4, numel=50)
        for clock, order in enumerate(orders):
            for rank in order:
                generator = torch.Generator().manual_seed(100 * clock + rank)
                gradient = torch.randn(50, generator=generator) * 10**rank
                store.handle(push(rank, clock, gradient, hyper=MOMENTUM), rank)
        return parameters(store)

    expected = run([(0, 1, 2, 3)] * 3)
    for order in itertools.permutations(range(4)):
        assert torch.equal(run([order, order[::-1], order]), expected)


def test_no_gradient_is_written_to() -> None:
    store = hub(BSP(), 3)
    given = [torch.full((4,), float(rank)) for rank in range(3)]
    for clock, rank in itertools.product(range(2), range(3)):
        store.handle(push(rank, clock, given[rank], hyper={**MOMENTUM, "weight_decay": 0.5}), rank)
    assert [tensor.tolist() for tensor in given] == [[float(rank)] * 4 for rank in range(3)]


def test_the_values_keep_their_memory() -> None:
    store = hub(BSP(), 1)
    first = tensor_of(store.handle(push(0, 0), "a")[0].reply).data_ptr()
    assert tensor_of(store.handle(push(0, 1), "b")[0].reply).data_ptr() == first


def test_the_learning_rate_of_the_push_is_the_one_used() -> None:
    store = hub(BSP(), 1)
    for clock, rate in enumerate((-1.0, -10.0, -100.0)):
        store.handle(push(0, clock, hyper={**ADD, "lr": rate}), clock)
    assert parameters(store).tolist() == [111.0] * 4


# Retries.


def test_a_retry_in_progress_counts_once_and_both_tries_are_answered() -> None:
    store = hub(BSP(), 2)
    assert store.handle(push(0, 0), "first") == []
    assert store.handle(push(0, 0), "second") == []
    deliveries = store.handle(push(1, 0), "other")
    assert answered(deliveries) == ["first", "second", "other"]
    assert parameters(store).tolist() == [1.0] * 4
    assert (store.stats().pushes, store.stats().duplicates) == (2, 1)


def test_a_retry_of_an_applied_push_is_answered_as_before_and_changes_nothing() -> None:
    store = hub(ASP(), 2)
    store.handle(push(1, 0), "other")
    ((_, before),) = store.handle(push(0, 0), "first")
    ((_, again),) = store.handle(push(0, 0), "second")
    assert again == before
    assert values_of(again).staleness == 1
    assert parameters(store).tolist() == [2.0] * 4


def test_a_retry_waits_with_its_first_try_for_the_staleness_bound() -> None:
    store = hub(SSP(0), 2)
    assert store.handle(push(0, 0), "first") == []
    assert store.handle(push(0, 0), "second") == []
    assert answered(store.handle(push(1, 0), "other")) == ["first", "second", "other"]


def test_an_echo_of_an_older_push_does_not_take_the_place_of_what_its_sender_waits_for() -> None:
    store = hub(SSP(1), 2)
    assert answered(store.handle(push(0, 0), "one")) == ["one"]
    assert store.handle(push(0, 1), "two") == []
    assert answered(store.handle(push(0, 0), "echo of one")) == ["echo of one"]
    assert answered(store.handle(push(1, 0), "other")) == ["two", "other"]


def test_an_echo_of_an_older_push_leaves_the_open_round_alone() -> None:
    store = hub(BSP(), 2)
    for rank in range(2):
        store.handle(push(rank, 0), rank)
    assert store.handle(push(0, 1), "now") == []
    ((ticket, echo),) = store.handle(push(0, 0), "echo")
    assert ticket == "echo"
    assert not values_of(echo).stable
    assert answered(store.handle(push(1, 1), "other")) == ["now", "other"]
    assert parameters(store).tolist() == [2.0] * 4


def test_a_clock_beyond_the_expected_one_is_out_of_order() -> None:
    refusal = refusal_of(hub(BSP(), 2).handle(push(0, 3), "p"))
    assert refusal.code is Code.OUT_OF_ORDER
    assert "at clock 3, expected was 0" in refusal.text


def test_a_worker_that_does_not_wait_for_its_read_is_out_of_order() -> None:
    store = hub(SSP(0), 2)
    assert store.handle(push(0, 0), "blocked") == []
    assert refusal_of(store.handle(push(0, 1), "too soon")).code is Code.OUT_OF_ORDER
    assert parameters(store).tolist() == [1.0] * 4


# Asynchronous modes.


def test_asp_applies_on_arrival_and_counts_staleness() -> None:
    store = hub(ASP(), 3)
    staleness = []
    for rank, clock in ((0, 0), (0, 1), (1, 0), (0, 2)):
        ((_, reply),) = store.handle(push(rank, clock), rank)
        staleness.append(values_of(reply).staleness)
        assert not values_of(reply).stable
    # Rank 1 had read version 0 and was applied on 2; rank 0 then lagged by that one.
    assert staleness == [0, 0, 2, 1]
    assert store.stats().staleness == Counter({0: 2, 2: 1, 1: 1})


def test_a_pull_counts_as_a_read_and_says_which_clock_comes_next() -> None:
    store = hub(ASP(), 2)
    store.handle(push(0, 0), "a")
    ((_, pulled),) = store.handle(Pull(sender(1), 0), "b")
    assert (values_of(pulled).version, values_of(pulled).clock) == (1, 0)
    ((_, reply),) = store.handle(push(1, 0), "c")
    assert values_of(reply).staleness == 0


def test_ssp_blocks_reader_beyond_staleness_until_the_slowest_catches_up() -> None:
    store = hub(SSP(1), 2)
    assert answered(store.handle(push(0, 0), "a0")) == ["a0"]
    assert store.handle(push(0, 1), "a1") == []
    assert parameters(store).tolist() == [2.0] * 4
    assert answered(store.handle(push(1, 0), "b0")) == ["a1", "b0"]


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.integers(0, 3), st.integers(2, 4), st.lists(st.integers(0, 3), min_size=10, max_size=60))
def test_ssp_bound_holds_for_any_schedule_and_nobody_waits_needlessly(
    staleness: int, workers: int, schedule: list[int]
) -> None:
    store = hub(SSP(staleness), workers)
    pushed, free = [0] * workers, set(range(workers))
    for drawn in schedule:
        rank = drawn % workers
        if rank not in free:
            continue
        free.remove(rank)
        deliveries = store.handle(push(rank, pushed[rank]), rank)
        pushed[rank] += 1
        for ticket, reply in deliveries:
            reader = int(str(ticket))
            values = values_of(reply)
            assert values.clock == pushed[reader]
            # Every stamp up to clock - staleness - 1 is in what it reads.
            assert min(pushed) >= values.clock - staleness
            assert values.version == sum(pushed)
            free.add(reader)
        assert free == {each for each in range(workers) if pushed[each] - min(pushed) <= staleness}


# Backup workers.


def test_backup_workers_close_a_round_with_the_first_gradients_and_drop_the_late_one() -> None:
    store = hub(BackupWorkers(1), 3)
    store.handle(push(0, 0, torch.full((4,), 1.0)), "a")
    deliveries = store.handle(push(2, 0, torch.full((4,), 5.0)), "c")
    assert answered(deliveries) == ["a", "c"]
    ((ticket, late),) = store.handle(push(1, 0, torch.full((4,), 99.0)), "b")
    assert ticket == "b"
    assert (values_of(late).clock, values_of(late).version) == (1, 1)
    assert parameters(store).tolist() == [3.0] * 4
    assert store.stats().dropped == 1
    assert not any(values_of(reply).stable for _, reply in deliveries)


def test_a_late_worker_skips_to_the_current_round_however_far_it_is() -> None:
    store = hub(BackupWorkers(1), 2)
    for clock in range(4):
        store.handle(push(0, clock), clock)
    ((_, late),) = store.handle(push(1, 0), "late")
    assert values_of(late).clock == 4
    ((_, again),) = store.handle(push(1, 0), "late again")
    assert (again, store.stats().dropped) == (late, 1)
    assert answered(store.handle(push(1, 4), "fresh")) == ["fresh"]
    assert parameters(store).tolist() == [5.0] * 4


def test_whoever_reads_in_lockstep_joins_the_open_round_whatever_it_missed() -> None:
    store = hub(BackupWorkers(1), 2)
    store.handle(push(1, 0), "its answer is lost")
    store.handle(push(0, 0), "late")
    store.handle(push(0, 1), "alone")
    ((_, again),) = store.handle(push(1, 0), "asked again")
    assert (values_of(again).clock, values_of(again).version) == (2, 2)
    store.handle(push(1, 2), "alone too")
    ((_, pulled),) = store.handle(Pull(sender(0), 0), "pull")
    assert (values_of(pulled).clock, values_of(pulled).version) == (3, 3)


def test_a_push_that_an_echoed_pull_overtook_is_dropped_and_not_refused() -> None:
    store = hub(BackupWorkers(1), 2)
    store.handle(push(0, 0), "a")
    store.handle(Pull(sender(1), 0), "echo of the first pull")
    ((_, reply),) = store.handle(push(1, 0), "b")
    assert values_of(reply).clock == 1


# Views.


def test_a_dead_worker_is_waited_for_no_more_and_the_mean_is_over_the_others() -> None:
    store = hub(BSP(), 3)
    store.handle(push(0, 0, torch.full((4,), 2.0)), "a")
    store.handle(push(2, 0, torch.full((4,), 4.0)), "c")
    deliveries = store.on_view(view(2, sender(0), sender(2)))
    assert answered(deliveries) == ["a", "c"]
    assert parameters(store).tolist() == [3.0] * 4


def test_what_a_dead_worker_gave_is_discarded_and_its_tries_are_refused() -> None:
    store = hub(BSP(), 3)
    store.handle(push(1, 0, torch.full((4,), 99.0)), "b")
    store.handle(push(0, 0), "a")
    assert refusal_of(store.on_view(view(2, sender(0), sender(2)))).code is Code.FENCED
    refusal = refusal_of(store.handle(push(1, 0), "zombie"))
    assert refusal.code is Code.FENCED
    assert "rank 1 (incarnation 101) takes no part as of epoch 2" in refusal.text
    assert answered(store.handle(push(2, 0), "c")) == ["a", "c"]
    assert parameters(store).tolist() == [1.0] * 4


def test_a_dead_worker_leaves_the_clocks_so_that_ssp_readers_go_on() -> None:
    store = hub(SSP(0), 3)
    store.handle(push(0, 0), "a")
    store.handle(push(1, 0), "b")
    assert answered(store.on_view(view(2, sender(0), sender(1)))) == ["a", "b"]


def test_a_joiner_starts_at_the_open_round_in_lockstep() -> None:
    store = hub(BSP(), 2)
    for rank in range(2):
        store.handle(push(rank, 0), rank)
    store.on_view(view(2, sender(0)))
    store.handle(push(0, 1), "alone")
    store.handle(push(0, 2), "open")
    late = sender(1, life=2)
    assert answered(store.on_view(view(3, sender(0), late))) == []
    ((_, pulled),) = store.handle(Pull(late, 0), "pull")
    assert (values_of(pulled).clock, values_of(pulled).version) == (3, 3)


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


def test_those_who_left_before_everybody_else_came_hold_nobody_up() -> None:
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


def test_what_was_pushed_in_a_trial_is_forgotten_with_its_plan() -> None:
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
    assert list(store.stats().partial) == [Run(key=0, first=1, last=3, ranks=(0,))]


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


def test_a_failed_job_refuses_all_who_wait_and_all_who_come() -> None:
    store = hub(BSP(), 2, keys=2)
    store.handle(push(0, 0), "push")
    barrier = Contribute(sender(1), 1, Call(Collective.BARRIER, "end"))
    store.handle(barrier, "barrier")
    deliveries = store.fail("a shard died")
    assert answered(deliveries) == ["push", "barrier"]
    for _, reply in [*deliveries, *store.handle(Pull(sender(1), 0), "late")]:
        assert reply == Refusal(Code.JOB_FAILED, "a shard died")


# Collectives.


def test_collectives_meet_on_the_store_without_any_plan() -> None:
    store = KVStore(ASP())
    store.on_view(view(1, sender(0), sender(1)))
    call = Call(Collective.ALLREDUCE, "loss", layouts=(Layout("float32", ()),))
    parts = [Contribute(sender(rank), 1, call, (torch.tensor(float(rank + 1)),)) for rank in range(2)]
    assert store.handle(parts[0], "a") == []
    deliveries = store.handle(parts[1], "b")
    assert deliveries == [Delivery(ticket, Result((torch.tensor(3.0),))) for ticket in "ab"]
    store.handle(Contribute(sender(0), 2, Call(Collective.BARRIER, "end")), "c")
    assert answered(store.on_view(view(2, sender(0)))) == ["c"]


# Requests that make no sense.


@pytest.mark.parametrize(
    ("request_", "code", "named"),
    [
        (push(0, 0, key=9), Code.UNKNOWN_KEY, "key 9 is not on this shard, which holds 1 keys from 0 to 0"),
        (push(0, 0, torch.ones(5)), Code.WRONG_SIZE, "key 0 holds float32[4], what came is float32[5]"),
        (push(0, 0, torch.ones(4, dtype=torch.float64)), Code.WRONG_SIZE, "float64[4]"),
        (Init(sender(0), 0, torch.ones(2, 2)), Code.WRONG_SIZE, "float32[2, 2]"),
        (push(0, 0, hyper={}), Code.BAD_REQUEST, "rank 0: SGD came with"),
        (push(0, 0, hyper={**ADD, "lr": float("nan")}), Code.BAD_REQUEST, "lr=nan"),
        (Pull(Sender(7, 1), 0), Code.FENCED, "rank 7"),
        (Contribute(Sender(0, 99), 1, Call(Collective.BARRIER, "x")), Code.FENCED, "incarnation 99"),
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
    with pytest.raises(ConfigError, match="cannot run LBFGS"):
        KVStore(BSP()).assign([piece], [bucket(4, "LBFGS")])
    with pytest.raises(ConfigError, match="bucket 0 holds int64: only floating"):
        KVStore(BSP()).assign([piece], [bucket(4, "SGD", "int64")])


# Snapshots.


def train(store: KVStore, workers: int, first: int, last: int, keys: int = 1) -> None:
    for clock, key, rank in itertools.product(range(first, last), range(keys), range(workers)):
        gradient = torch.randn(4, generator=torch.Generator().manual_seed(97 * clock + 7 * key + rank))
        assert not any(
            isinstance(reply, Refusal)
            for _, reply in store.handle(push(rank, clock, gradient, key=key, hyper=MOMENTUM), rank)
        )


def test_a_restored_run_goes_on_bitwise() -> None:
    straight = hub(BSP(), 2, keys=2)
    train(straight, 2, 0, 5, keys=2)
    assert straight.capture_at(5)
    snapshot = straight.captured()
    assert snapshot is not None
    train(straight, 2, 5, 9, keys=2)

    restored = hub(BSP(), 2, keys=2, initialise=False)
    restored.restore(snapshot)
    assert values_of(restored.handle(Pull(sender(1), 1), "pull")[0].reply).clock == 5
    train(restored, 2, 5, 9, keys=2)
    for key in range(2):
        assert torch.equal(parameters(restored, key=key), parameters(straight, key=key))


def test_a_lockstep_snapshot_holds_every_key_at_the_same_version() -> None:
    store = hub(BSP(), 1, keys=2)
    store.handle(push(0, 0, key=0), "a")
    assert store.capture_at(2)
    for clock in (1, 2, 3):
        store.handle(push(0, clock, key=0), clock)
    assert store.captured() is None
    for clock in range(4):
        store.handle(push(0, clock, key=1), clock)
    snapshot = store.captured()
    assert snapshot is not None
    assert {key: (state.version, state.values.tolist()) for key, state in snapshot.items()} == {
        key: (2, [2.0] * 4) for key in range(2)
    }
    assert store.captured() is None


def test_a_version_that_some_key_has_passed_cannot_be_caught_any_more() -> None:
    store = hub(BSP(), 1, keys=2)
    store.handle(push(0, 0), "a")
    assert not store.capture_at(0)
    assert store.captured() is None
    assert store.stats().newest == 1
    assert store.stats().oldest == 0
    assert store.capture_at(1)
    store.stop_capture()
    store.handle(push(0, 0, key=1), "b")
    assert store.captured() is None


def test_an_asynchronous_snapshot_is_of_now_and_later_pushes_do_not_change_it() -> None:
    store = hub(ASP(), 2)
    store.handle(push(0, 0), "a")
    store.handle(push(1, 0), "b")
    store.handle(push(0, 1), "c")
    assert store.capture_at(None)
    snapshot = store.captured()
    assert snapshot is not None
    store.handle(push(0, 2), "d")
    assert snapshot[0].values.tolist() == [3.0] * 4
    assert snapshot[0].clocks == {0: 2, 1: 1}

    restored = KVStore(ASP())
    restored.assign([Slice(0, 0, 0, 4, 0)], [bucket(4)])
    restored.restore(snapshot)
    restored.on_view(view(1, sender(0, life=3), sender(1, life=3)))
    pulled = [values_of(restored.handle(Pull(sender(rank, life=3), 0), rank)[0].reply) for rank in range(2)]
    assert [(values.clock, values.version) for values in pulled] == [(1, 3), (1, 3)]


def test_a_key_without_values_is_caught_when_it_gets_them() -> None:
    store = hub(ASP(), 1, initialise=False)
    assert store.capture_at(None)
    assert store.captured() is None
    store.handle(Init(sender(0), 0, torch.ones(4)), "init")
    snapshot = store.captured()
    assert snapshot is not None
    assert snapshot[0].values.tolist() == [1.0] * 4


def test_a_snapshot_of_another_model_is_refused() -> None:
    store = hub(BSP(), 1)
    store.capture_at(None)
    snapshot = store.captured()
    assert snapshot is not None
    with pytest.raises(CheckpointCorrupt, match="does not hold key 1"):
        hub(BSP(), 1, keys=2).restore(snapshot)
    with pytest.raises(CheckpointCorrupt, match="made by another job"):
        hub(BSP(), 1, numel=5).restore(snapshot)


def test_who_waits_for_first_values_is_told_when_rank_0_is_gone() -> None:
    store = KVStore(BSP())
    store.assign([Slice(0, 0, 0, 4, 0)], [BucketSpec(0, "float32", 0, "SGD", (TensorSpec("w", (4,)),))])
    store.on_view(View(1, (Member(0, 1), Member(1, 2))))
    assert store.handle(Pull(Sender(1, 2), 0), "early") == []
    (early,) = store.on_view(View(2, (Member(1, 2),)))
    (late,) = store.handle(Pull(Sender(1, 2), 0), "late")
    assert [early.ticket, late.ticket] == ["early", "late"]
    for delivery in (early, late):
        assert isinstance(delivery.reply, Refusal)
        assert delivery.reply.code is Code.JOB_FAILED
        assert "rank 0" in delivery.reply.text


# Compression.


def coded(tensor: Tensor, name: str = "int8") -> Coded:
    payload = torch.empty(by_name(name).nbytes(len(tensor)), dtype=torch.uint8)
    by_name(name).encode(tensor, payload)
    return Coded(name, payload, len(tensor), tensor.dtype)


def decoded(code: Tensor | Coded | None) -> Tensor:
    assert isinstance(code, Coded)
    out = torch.empty(code.numel, dtype=code.dtype)
    by_name(code.codec).decode(code.payload, out)
    return out


def coded_push(rank: int, clock: int, gradient: Tensor, *, hyper: Hyper = ADD, name: str = "int8") -> Push:
    return Push(sender(rank), 0, clock, coded(gradient, name), hyper)


def test_coded_gradients_are_averaged_and_the_parameters_come_back_exact() -> None:
    store = hub(BSP(), 2, codec="int8")
    store.handle(coded_push(0, 0, torch.tensor([2.0, 0, 0, 0])), "a")
    deliveries = store.handle(coded_push(1, 0, torch.tensor([0, 4.0, 0, 0])), "b")
    for _, reply in deliveries:
        torch.testing.assert_close(tensor_of(reply), torch.tensor([1.0, 2.0, 0, 0]))


def test_an_averaging_hub_answers_in_the_codec_and_makes_up_for_what_it_left_out() -> None:
    store = hub(BSP(), 2, optimizer="", codec="topk:0.25")
    gradient = torch.tensor([3.0, 2.0, 0, 0])
    sums = torch.zeros(4)
    for clock in range(20):
        for rank in range(2):
            deliveries = store.handle(coded_push(rank, clock, gradient, hyper={}, name="topk:0.25"), rank)
        first, second = (values_of(reply).values for _, reply in deliveries)
        assert torch.equal(decoded(first), decoded(second))
        sums += decoded(first)
    # The workers here keep nothing back, so only their largest element is ever given.
    torch.testing.assert_close(sums, 20 * torch.tensor([3.0, 0, 0, 0]))


def test_before_the_first_round_an_averaging_hub_answers_zeros_in_the_codec() -> None:
    for name in ("bf16", "int8", "sign", "topk:0.25"):
        store = hub(BSP(), 1, optimizer="", numel=64, codec=name)
        ((_, reply),) = store.handle(Pull(sender(0), 0), "look")
        assert decoded(values_of(reply).values).tolist() == [0.0] * 64


def test_a_retry_is_answered_with_the_same_code() -> None:
    store = hub(BSP(), 1, optimizer="", codec="sign", numel=64)
    push_ = coded_push(0, 0, torch.arange(64.0), hyper={}, name="sign")
    ((_, before),) = store.handle(push_, "first")
    code = decoded(values_of(before).values)
    ((_, again),) = store.handle(push_, "second")
    assert torch.equal(decoded(values_of(again).values), code)
    assert store.stats().duplicates == 1


@pytest.mark.parametrize(
    ("codec", "gradient", "says"),
    [
        ("int8", torch.ones(4), "takes gradients in int8, what came is uncompressed"),
        ("", coded(torch.ones(4)), "takes gradients as they are, what came is in int8"),
        ("bf16", coded(torch.ones(4)), "takes gradients in bf16, what came is in int8"),
        ("int8", coded(torch.ones(5)), "holds float32[4], what came is float32[5] in int8"),
        ("int8", coded(torch.ones(4).double()), "what came is float64[4] in int8"),
    ],
)
def test_a_gradient_in_another_codec_or_size_is_refused(
    codec: str, gradient: Tensor | Coded, says: str
) -> None:
    store = hub(BSP(), 1, codec=codec)
    refusal = refusal_of(store.handle(Push(sender(0), 0, 0, gradient, ADD), "p"))
    assert refusal.code is Code.WRONG_SIZE
    assert says in refusal.text
    assert parameters(store).tolist() == [0.0] * 4


@pytest.mark.parametrize("codec", ["", "int8"])
def test_no_mean_is_taken_over_those_gradients_alone_that_came_in_the_right_form(codec: str) -> None:
    entry = Entry.make(Slice(0, 0, 0, 4, 0), bucket(4, codec=codec), torch.zeros(16, dtype=torch.uint8))
    pushes = (push(0, 0), coded_push(1, 0, torch.ones(4)))
    entry.contributions = {each.sender.rank: Contribution(each, [], each.gradient) for each in pushes}
    with pytest.raises(AssertionError, match="key 0 took gradients in another form"):
        entry.close(torch.empty(8))


def test_a_slice_that_would_not_shrink_is_pushed_as_it_is() -> None:
    store = hub(BSP(), 1, numel=1, codec="int8")
    ((_, reply),) = store.handle(push(0, 0, torch.ones(1)), "p")
    assert tensor_of(reply).tolist() == [1.0]

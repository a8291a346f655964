"""A shard's state machine in asynchronous modes and with backup workers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hubring.ps.core.messages import Code, Pull, Refusal
from hubring.ps.store.consistency import ASP, BSP, SSP, BackupWorkers, Consistency, by_name
from tests.support.replicated import Recorder
from tests.support.store import (
    ADD,
    answered,
    coded_push,
    hub,
    parameters,
    push,
    refusal_of,
    sender,
    values_of,
)


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


@pytest.mark.parametrize(("consistency", "times"), [(BSP(), 1), (ASP(), 0)])
def test_ranks_in_lockstep_that_differ_in_an_option_are_named_once(
    consistency: Consistency, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = hub(consistency, 3)
    for step in range(3):
        for rank in range(3):
            halved = rank == 2 and step > 0
            store.handle(push(rank, step, hyper={**ADD, "lr": 0.05 if halved else 0.1}), (step, rank))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == times
    for text in told:
        assert (
            "rank 0 has lr=0.1 in step 2, and rank 2 has lr=0.05; the hub steps with those of rank 0" in text
        )
        assert "hubring.allreduce" in text


def test_a_name_with_its_constants_makes_the_rule() -> None:
    assert by_name("bsp") == BSP()
    assert by_name("asp") == ASP()
    assert by_name("ssp", staleness=3) == SSP(3)
    assert by_name("backup", backup=1) == BackupWorkers(1)


# Weights.


@pytest.mark.parametrize(("optimizer", "codec"), [("SGD", ""), ("SGD", "bf16"), ("", "")])
def test_a_round_has_the_weighted_mean_also_on_a_standby_and_after_a_retry(
    optimizer: str, codec: str
) -> None:
    (primary, standby), recorder = (
        [hub(BSP(), 3, optimizer=optimizer, codec=codec) for _ in range(2)],
        Recorder(),
    )
    primary.replicate(recorder)
    hyper = ADD if optimizer else {}
    for clock in range(2):
        for rank, weight in enumerate((6.0, None, 1.0)):  # none counts as 1
            gradient = torch.full((4,), float(2**rank))
            made = coded_push(rank, clock, gradient, hyper=hyper, name=codec) if codec else None
            sent = replace(made or push(rank, clock, gradient, hyper=hyper), weight=weight)
            for _ in range(2):
                primary.handle(sent, rank)
    for change in recorder.sent:
        change(standby)
    mean = (6 + 2 + 4) / 8
    assert (
        parameters(primary).tolist() == parameters(standby).tolist() == [mean * (2 if optimizer else 1)] * 4
    )
    assert primary.stats().duplicates == 6


def test_a_sum_without_a_weight_counts_as_many_gradients_as_it_has() -> None:
    store = hub(BSP(), 3)
    store.handle(replace(push(0, 0, torch.full((4,), 5.0)), covers=(sender(1),)), "a")
    store.handle(replace(push(2, 0, torch.full((4,), 3.0)), weight=4.0), "b")
    torch.testing.assert_close(parameters(store), torch.full((4,), (5 + 4 * 3) / 6))


def test_of_a_round_with_backup_workers_the_weights_of_those_count_that_are_in_it() -> None:
    store = hub(BackupWorkers(1), 3)
    store.handle(replace(push(0, 0, torch.full((4,), 1.0)), weight=3.0), "a")
    store.handle(replace(push(2, 0, torch.full((4,), 5.0)), weight=1.0), "c")
    store.handle(replace(push(1, 0, torch.full((4,), 99.0)), weight=9.0), "b")
    assert parameters(store).tolist() == [2.0] * 4


@pytest.mark.parametrize("consistency", [ASP(), SSP(1)])
def test_a_gradient_that_is_applied_alone_has_no_weight(consistency: Consistency) -> None:
    store = hub(consistency, 2)
    store.handle(replace(push(0, 0, torch.full((4,), 0.1)), weight=7.0), "a")
    assert parameters(store).tolist() == torch.full((4,), 0.1).tolist()


@pytest.mark.parametrize("weight", [-1.0, inf, nan])
def test_a_push_with_no_possible_weight_is_refused(weight: float) -> None:
    store = hub(BSP(), 2)
    refusal = refusal_of(store.handle(replace(push(1, 0), weight=weight), "a"))
    assert refusal == Refusal(Code.BAD_REQUEST, f"rank 1 sent a weight of {weight}")

"""What a script writes between two steps is applied before the next one, or refused; and who must agree."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hubring.ps.core.messages import (
    Code,
    CollectiveResult,
    Delivery,
    Pull,
    Push,
    Refusal,
    Values,
    WriteParameters,
    WriteState,
)
from hubring.ps.core.optimizer_state import STEP, OptimizerState
from hubring.ps.store.consistency import ASP, BSP, SSP, BackupWorkers, Consistency
from tests.support.store import (
    ADD,
    MOMENTUM,
    answered,
    hub,
    load,
    parameters,
    push,
    refusal_of,
    sender,
    state,
    values_of,
    view,
    write,
)

DONE = [Delivery("w", CollectiveResult())]


def test_a_retry_of_an_acknowledged_state_changes_nothing() -> None:
    """The other worker has pushed since."""
    store = hub(ASP(), 2)
    store.handle(push(1, 0, hyper=MOMENTUM), "p")
    fresh = load(0, 0, 20.0)
    assert store.handle(fresh, "w") == DONE
    store.handle(push(1, 1, hyper=MOMENTUM), "p")
    held = state(store)
    assert held == {"momentum_buffer": [19.0] * 4}
    assert store.handle(fresh, "w") == DONE
    assert state(store) == held


# Lockstep.


def test_the_senders_memory_is_free_after_the_reply() -> None:
    store, whole = hub(BSP(), 1), torch.full((4,), 7.0)
    store.handle(write(0, 0, whole), "w")
    whole.zero_()
    store.handle(push(0, 0), "a")
    assert parameters(store).tolist() == [8.0] * 4


def test_a_rank_that_wrote_nothing_holds_the_hubs_parameters() -> None:
    store = hub(BSP(), 2)
    store.handle(write(1, 0, 0.0), "w")  # what they were
    for rank in range(2):
        store.handle(push(rank, 0), rank)
    assert parameters(store).tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("writes", "ranks"),
    [
        ([write(0, 0, 7.0)], "ranks 0 and 1"),
        ([write(1, 0, 7.0)], "ranks 0 and 1"),
        ([write(0, 0, 7.0), write(1, 0, 7.0), write(2, 0, 8.0)], "ranks 0 and 2"),
        ([write(0, 0, -0.0), write(1, 0, 0.0), write(2, 0, 0.0)], "ranks 0 and 1"),
    ],
)
def test_ranks_that_change_parameters_differently_end_the_job(
    writes: list[WriteParameters], ranks: str
) -> None:
    store = hub(BSP(), 3)
    for one in writes:
        assert store.handle(one, "w") == DONE
    for rank in range(2):
        assert store.handle(push(rank, 0), rank) == []
    deliveries = store.handle(push(2, 0), 2)
    assert sorted(map(str, answered(deliveries))) == ["0", "1", "2"]
    for _, reply in deliveries:
        assert isinstance(reply, Refusal)
        assert reply.code is Code.MISMATCH
        assert f"{ranks} have different parameters before step 1: weight [4] differs" in reply.text
        assert "Make the same change on every rank between the same two steps" in reply.text
    assert refusal_of(store.handle(Pull(sender(0), 0), "later")).code is Code.MISMATCH


def test_nan_bits_that_agree_are_no_difference() -> None:
    store = hub(BSP(), 2)
    for rank in range(2):
        store.handle(write(rank, 0, float("nan")), "w")
        store.handle(push(rank, 0, torch.zeros(4)), rank)
    assert parameters(store).isnan().all()


def test_a_retry_or_a_second_change_replaces_the_first_but_a_late_retry_does_not() -> None:
    store = hub(BSP(), 1)
    for value, sequence in ((5.0, 3), (5.0, 3), (6.0, 4), (5.0, 3)):
        assert store.handle(write(0, 0, value, sequence), "w") == DONE
    store.handle(push(0, 0), "a")
    assert parameters(store).tolist() == [7.0] * 4
    assert store.handle(write(0, 0, 6.0, 4), "w") == DONE, "an echo of a round that is over"
    store.handle(push(0, 1), "b")
    assert parameters(store).tolist() == [8.0] * 4


def test_a_worker_whose_round_closes_without_it_leaves_no_write_behind() -> None:
    store = hub(BackupWorkers(1), 2)
    store.handle(write(1, 0, 7.0), "w")
    store.handle(push(0, 0), "a")  # closes the round alone
    assert parameters(store).tolist() == [1.0] * 4
    assert store.handle(write(1, 0, 7.0, 1), "w") == DONE, "late"
    store.handle(push(1, 0), "dropped")
    store.handle(push(0, 1), "b")
    assert parameters(store).tolist() == [2.0] * 4


def test_a_lost_worker_leaves_no_write_behind() -> None:
    store = hub(BSP(), 2)
    store.handle(write(1, 0, 7.0), "w")
    store.handle(push(0, 0), "a")
    deliveries = store.on_view(view(2, sender(0)))
    assert [values_of(reply).version for _, reply in deliveries] == [1]
    assert parameters(store).tolist() == [1.0] * 4
    assert refusal_of(store.handle(write(1, 1, 7.0), "w")).code is Code.FENCED
    store.on_view(view(3, sender(0), sender(1, life=2)))
    assert store.handle(WriteParameters(sender(1, 2), 0, 1, 0, torch.zeros(4)), "w") == DONE
    store.handle(write(0, 1, 0.0), "w")
    for push_ in (push(0, 1), Push(sender(1, 2), 0, 1, torch.ones(4), ADD)):
        store.handle(push_, "p")
    assert parameters(store).tolist() == [1.0] * 4


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.lists(st.booleans(), min_size=4, max_size=4), st.lists(st.integers(0, 5), max_size=60))
def test_repeats_and_reorderings_change_nothing(changes: list[bool], script: list[int]) -> None:
    """Two ranks change the parameters before some steps, and any old message comes again at any time."""
    store, sent = hub(BSP(), 2), list[Push | WriteParameters]()
    clocks, wrote = [0, 0], [-1, -1]
    waiting = [False, False]

    def deliver(one: Push | WriteParameters, *, echo: bool = False) -> None:
        ticket = None if echo else ("answer", one.sender.rank)
        for to, reply in store.handle(one, ticket):
            assert not isinstance(reply, Refusal)
            if isinstance(reply, Values) and to is not None:
                rank = to[1]  # type: ignore[index]
                clocks[rank], waiting[rank] = reply.clock, False

    for action in [*script, *[0, 1] * 12]:
        rank, clock = action % 2, clocks[action % 2]
        if action >= 4 and sent:
            deliver(sent[-1 - action % min(len(sent), 3)], echo=True)
        elif waiting[rank] or clock == len(changes):
            continue
        elif changes[clock] and wrote[rank] < clock:
            wrote[rank] = clock
            sent.append(write(rank, clock, 10.0 * clock, sequence=clock))
            deliver(sent[-1])
        else:
            waiting[rank] = True
            sent.append(push(rank, clock))
            deliver(sent[-1])
    assert clocks == [len(changes)] * 2
    expected = 0.0
    for clock, changed in enumerate(changes):
        expected = (10.0 * clock if changed else expected) + 1
    assert parameters(store).tolist() == [expected] * 4


# Optimizer state.


@pytest.mark.parametrize("other", [load(1, 0, 9.0), load(1, 0, None), None])
def test_ranks_that_load_different_states_end_the_job(other: WriteState | None) -> None:
    store = hub(BSP(), 2)
    store.handle(load(0, 0, 10.0), "w")
    if other is not None:
        store.handle(other, "w")
    store.handle(push(0, 0, hyper=MOMENTUM), 0)
    (_, reply), _ = store.handle(push(1, 0, hyper=MOMENTUM), 1)
    assert isinstance(reply, Refusal)
    assert reply.code is Code.MISMATCH
    assert "ranks 0 and 1 have different optimizer state" in reply.text
    assert "weight [4] differs" in reply.text


def momentum(tensor: Tensor, fresh: tuple[int, ...] = (), name: str = "momentum_buffer") -> WriteState:
    return WriteState(sender(0), 0, 0, 0, OptimizerState({name: tensor}, fresh))


@pytest.mark.parametrize(
    ("of", "given", "says"),
    [
        ({"optimizer": "Adam"}, momentum(torch.zeros(4)), "lacks step, exp_avg, exp_avg_sq; Adam needs step"),
        ({}, momentum(torch.zeros(5)), r"momentum_buffer has shape \[5\], expected \[4\]"),
        ({}, momentum(torch.zeros(4).double()), "torch.float64, expected torch.float32"),
        ({"optimizer": "Adam"}, momentum(torch.zeros(4), name=STEP), r"step has shape \[4\], expected \[1\]"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(of: dict[str, Any], given: WriteState, says: str) -> None:
    refusal = refusal_of(hub(BSP(), 1, **of).handle(given, "w"))
    assert refusal.code is Code.BAD_REQUEST
    assert re.search(f"does not fit weight.* {says}", refusal.text), refusal.text


@pytest.mark.parametrize(
    ("of", "given", "code", "says"),
    [
        ({}, momentum(torch.zeros(4), fresh=(1,)), Code.BAD_REQUEST, "[1] are fresh, but the slice has 1"),
        ({"optimizer": ""}, write(0, 0, 1.0), Code.BAD_REQUEST, "with --aggregate the workers hold them"),
        ({"optimizer": ""}, load(0, 0, 1.0), Code.BAD_REQUEST, "with --aggregate the workers hold them"),
        ({"initialise": False}, write(0, 0, 1.0), Code.BAD_REQUEST, "key 0 has no values yet"),
        ({}, write(0, 0, torch.zeros(5)), Code.WRONG_SIZE, "float32[4]"),
        ({}, write(0, 1, 7.0), Code.OUT_OF_ORDER, "clock"),
    ],
)
def test_a_write_that_cannot_be_applied_is_refused(
    of: dict[str, Any], given: WriteParameters | WriteState, code: Code, says: str
) -> None:
    refusal = refusal_of(hub(BSP(), 1, **of).handle(given, "w"))
    assert refusal.code is code
    assert says in refusal.text


def test_a_hub_that_averages_holds_no_state() -> None:
    assert state(hub(BSP(), 1, optimizer="")) == {}


# Asynchronous modes.


@pytest.mark.parametrize("consistency", [ASP(), SSP(2)])
def test_the_only_worker_of_an_asynchronous_hub_writes_at_once(consistency: Consistency) -> None:
    store = hub(consistency, 1)
    assert store.handle(write(0, 0, 7.0), "w") == DONE
    assert parameters(store).tolist() == [7.0] * 4
    store.handle(push(0, 0), "a")
    assert store.handle(write(0, 0, 7.0), "w") == DONE, "an echo"
    assert parameters(store).tolist() == [8.0] * 4
    store.handle(load(0, 1, 10.0), "w")
    assert state(store) == {"momentum_buffer": [10.0] * 4}


def test_several_workers_of_an_asynchronous_hub_load_states_but_write_no_parameters() -> None:
    store = hub(ASP(), 2)
    refusal = refusal_of(store.handle(write(1, 0, 7.0), "w"))
    assert refusal.code is Code.BAD_REQUEST
    assert "rank 1 changed weight [4]" in refusal.text
    assert "use --mode bsp or --aggregate, or change them on one rank before training" in refusal.text
    assert store.handle(load(1, 0, 10.0), "w") == DONE
    assert state(store) == {"momentum_buffer": [10.0] * 4}
    assert answered(store.handle(push(0, 0, hyper=MOMENTUM), "a")) == ["a"]


@pytest.mark.parametrize("loads", [False, True])
def test_a_worker_that_joins_between_two_steps_agrees_with_the_others(loads: bool) -> None:
    store = hub(BSP(), 2)
    for rank in range(2):
        store.handle(push(rank, 0), rank)
    store.on_view(view(2, sender(0)))
    store.handle(load(0, 1, 10.0) if loads else write(0, 1, 7.0), "w")
    store.on_view(view(3, sender(0), sender(1, life=2)))

    def step(clock: int) -> list[Delivery]:
        gradient = Push(sender(1, 2), 0, clock, torch.ones(4), MOMENTUM if loads else ADD)
        return [
            *store.handle(push(0, clock, hyper=MOMENTUM if loads else ADD), "a"),
            *store.handle(gradient, "b"),
        ]

    assert [type(reply) for _, reply in step(1)] == [Values, Values]
    if loads:
        assert state(store) == {"momentum_buffer": [10.0] * 4}
    else:
        assert parameters(store).tolist() == [8.0] * 4
    store.handle(load(0, 2, 10.0) if loads else write(0, 2, 7.0), "w")
    assert [type(reply) for _, reply in step(2)] == [Refusal, Refusal], "from its second step on it counts"


def test_the_writes_of_a_late_worker_must_agree() -> None:
    store = hub(BSP(), 2)
    store.on_view(view(2, sender(0)))
    store.on_view(view(3, sender(0), sender(1, life=2)))
    store.handle(WriteParameters(sender(1, 2), 0, 0, 0, torch.ones(4)), "w")
    store.handle(push(0, 0), "a")
    deliveries = store.handle(Push(sender(1, 2), 0, 0, torch.ones(4), ADD), "b")
    assert [type(reply) for _, reply in deliveries] == [Refusal, Refusal]


def test_a_rank_without_any_gradient_agrees_with_the_others() -> None:
    store = hub(BSP(), 2)
    store.handle(write(0, 0, 7.0), "w")
    store.handle(push(0, 0), "a")
    deliveries = store.handle(Push(sender(1), 0, 0, torch.zeros(4), ADD, (0,)), "b")
    assert answered(deliveries) == ["a", "b"]
    assert parameters(store).tolist() == [7.5] * 4


def test_ranks_must_agree_on_parameters_that_no_rank_has_a_gradient_for() -> None:
    store = hub(BSP(), 2)
    store.handle(write(0, 0, 7.0), "w")
    for rank in range(2):
        deliveries = store.handle(Push(sender(rank), 0, 0, torch.zeros(4), ADD, (0,)), rank)
    assert [type(reply) for _, reply in deliveries] == [Refusal, Refusal]

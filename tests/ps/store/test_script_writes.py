"""What a script writes between two steps is applied before the next one, or refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hubring.ps.core.messages import (
    Code,
    Delivery,
    Init,
    Pull,
    Push,
    Refusal,
    Result,
    Values,
    WriteParameters,
    WriteState,
)
from hubring.ps.core.optimizer_state import STEP, OptimizerState
from hubring.ps.core.types import Slice
from hubring.ps.store.consistency import ASP, BSP, SSP, BackupWorkers, Consistency
from tests.support.optimizers import CASES, hyper, torchs
from tests.support.sharded import ShardedModel
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

pytestmark = pytest.mark.usefixtures("kernels")

DONE = [Delivery("w", Result())]


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


def test_a_change_that_every_rank_makes_is_applied_before_the_step() -> None:
    store = hub(BSP(), 2)
    assert store.handle(write(0, 0, 7.0), "w") == DONE
    assert parameters(store).tolist() == [0.0] * 4, "not before the round"
    store.handle(push(0, 0), "a")
    assert store.handle(write(1, 0, 7.0), "w") == DONE
    deliveries = store.handle(push(1, 0), "b")
    assert answered(deliveries) == ["a", "b"]
    assert parameters(store).tolist() == [8.0] * 4
    for rank in range(2):
        store.handle(push(rank, 1), rank)
    assert parameters(store).tolist() == [9.0] * 4, "once"


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


def test_the_parameter_that_differs_is_named() -> None:
    model = ShardedModel((100, 50, 2000), "SGD", BSP())
    model.init(torch.zeros(2150))
    changed = torch.zeros(2150)
    changed[[149, 2000]] = 1.0
    piece = model.slices[0]
    model.ask(piece, WriteParameters(sender(1), piece.key, 0, 0, model.part(changed, piece)))
    model.push(0, 0, torch.zeros(2150), ADD)
    refusals = [reply for _, reply in model.push(1, 0, torch.zeros(2150), ADD) if isinstance(reply, Refusal)]
    assert any("p1 [50] differs" in refusal.text for refusal in refusals)


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


def test_a_write_before_its_senders_last_reply_is_out_of_order() -> None:
    refusal = refusal_of(hub(BSP(), 2).handle(write(0, 1, 7.0), "w"))
    assert refusal.code is Code.OUT_OF_ORDER


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


def test_a_state_that_every_rank_loads_is_the_next_steps() -> None:
    store = hub(BSP(), 2)
    for rank in range(2):
        assert store.handle(load(rank, 0, 10.0), "w") == DONE
    assert state(store) == {"momentum_buffer": [10.0] * 4}, "what this rank loaded"
    for rank in range(2):
        store.handle(push(rank, 0, hyper=MOMENTUM), rank)
    assert state(store) == {"momentum_buffer": [10.0] * 4}  # 0.9 * 10 + 1
    for rank in range(2):
        store.handle(load(rank, 1, None), "w")
        store.handle(push(rank, 1, torch.full((4,), 3.0), hyper=MOMENTUM), rank)
    assert state(store) == {"momentum_buffer": [3.0] * 4}, "the first step of a fresh optimizer"


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


def test_the_first_step_reads_as_no_state() -> None:
    store = hub(BSP(), 1)
    assert state(store) == {}
    store.handle(push(0, 0, hyper=MOMENTUM), "a")
    assert state(store) == {"momentum_buffer": [1.0] * 4}


def test_rank_0_brings_the_first_state_with_the_first_values() -> None:
    store = hub(BSP(), 1, initialise=False)
    given = OptimizerState({"momentum_buffer": torch.full((4,), 10.0)})
    store.handle(Init(sender(0), 0, torch.zeros(4), given), "init")
    assert state(store) == {"momentum_buffer": [10.0] * 4}
    later = OptimizerState({"momentum_buffer": torch.full((4,), 20.0)})
    store.handle(Init(sender(0), 0, torch.ones(4), later), "again")
    assert state(store) == {"momentum_buffer": [10.0] * 4}
    assert parameters(store).tolist() == [0.0] * 4


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_state_moves_from_torch_to_the_hub_and_back(name: str, options: dict[str, Any]) -> None:
    sizes = (96, 16, 64)  # whole vectors: SGD has no counts of steps, so its slice is not split
    own = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
    optimizers = [torchs(name, [parameter], options) for parameter in own]

    def step_by_torch(seed: int, skipped: int = -1) -> Tensor:
        whole = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed))
        for at, part in enumerate(whole.split(sizes)):
            if at != skipped:
                own[at].grad = part.clone()
                optimizers[at].step()
        return whole

    for seed in range(3):
        step_by_torch(seed, skipped=2 if seed < 2 else 0)
    model = ShardedModel(sizes, name, BSP(), workers=1, shards=1)
    (piece,) = model.slices
    states = [dict(optimizers[at].state[own[at]]) for at in range(3)]
    names = [key for key in states[0] if states[0][key] is not None]
    tensors = {
        key: torch.stack([one[key] for one in states])
        if key == STEP
        else torch.cat([one[key] for one in states])
        for key in names
    }

    def first_state(_: Slice) -> OptimizerState:
        return OptimizerState(tensors)

    model.init(torch.cat([parameter.detach() for parameter in own]), first_state)
    for clock in range(3):
        model.push(0, clock, step_by_torch(10 + clock), hyper(name, options))
    assert torch.equal(model.values(), torch.cat([parameter.detach() for parameter in own]))
    came = model.state(piece)
    for at, optimizer in enumerate(optimizers):
        for key, tensor in optimizer.state[own[at]].items():
            if tensor is not None:
                ours = came.tensors[key][at] if key == STEP else came.tensors[key].split(sizes)[at]
                assert torch.equal(ours, tensor), f"{key} of p{at}"


@pytest.mark.parametrize(
    ("optimizer", "given", "says"),
    [
        ("Adam", {"momentum_buffer": torch.zeros(4)}, "lacks step, exp_avg, exp_avg_sq; Adam needs step"),
        ("SGD", {"momentum_buffer": torch.zeros(5)}, "momentum_buffer has shape [5], expected [4]"),
        ("SGD", {"momentum_buffer": torch.zeros(4).double()}, "torch.float64, expected torch.float32"),
        ("Adam", {STEP: torch.zeros(4)}, "step has shape [4], expected [1]"),
    ],
)
def test_a_state_of_another_optimizer_or_model_is_refused(
    optimizer: str, given: dict[str, Tensor], says: str
) -> None:
    store = hub(BSP(), 1, optimizer=optimizer)
    refusal = refusal_of(store.handle(WriteState(sender(0), 0, 0, 0, OptimizerState(given)), "w"))
    assert refusal.code is Code.BAD_REQUEST
    assert says in refusal.text
    assert "does not fit weight" in refusal.text


def test_fresh_parameters_that_the_slice_does_not_have_are_refused() -> None:
    given = OptimizerState({"momentum_buffer": torch.zeros(4)}, fresh=(1,))
    refusal = refusal_of(hub(BSP(), 1).handle(WriteState(sender(0), 0, 0, 0, given), "w"))
    assert "[1] are fresh, but the slice has 1" in refusal.text


def test_a_hub_that_averages_holds_nothing_to_write() -> None:
    store = hub(BSP(), 1, optimizer="")
    for one in (write(0, 0, 1.0), load(0, 0, 1.0)):
        refusal = refusal_of(store.handle(one, "w"))
        assert refusal.code is Code.BAD_REQUEST
        assert "with --aggregate the workers hold them" in refusal.text
    assert state(store) == {}


def test_nothing_is_written_before_the_first_values() -> None:
    refusal = refusal_of(hub(BSP(), 1, initialise=False).handle(write(0, 0, 1.0), "w"))
    assert "key 0 has no values yet" in refusal.text


def test_parameters_of_another_size_are_refused() -> None:
    refusal = refusal_of(hub(BSP(), 1).handle(write(0, 0, torch.zeros(5)), "w"))
    assert refusal.code is Code.WRONG_SIZE


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

"""hvd.elastic: states, the sampler, and training that goes on when workers come and go."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hubring.horovod as hvd
from hubring.workers.horovod.elastic import state as states
from hubring.workers.horovod.elastic.membership import RingMembership
from hubring.workers.horovod.elastic.notification import HostUpdateResult
from hubring.workers.horovod.elastic.state import (
    ObjectState,
    StateHandler,
    get_handler_registry,
    run_fn,
    set_handler_registry,
)
from hubring.workers.horovod.world import HorovodWorld, neighbourhood
from tests.support.processes.cluster import Cluster, Program
from tests.workers.horovod.conftest import Everybody, every_rank

SCRIPT = str(Path(__file__).with_name("elastic_script.py"))


def state_of(value: float, **more: Any) -> hvd.elastic.TorchState:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=value + 1)
    return hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, **more)


def has_printed(program: Program, words: str) -> bool:
    return words in program.out.read_text()


@every_rank
def test_restore_puts_back_what_was_committed() -> None:
    state = state_of(1.0, name="first")
    state.batch, state.name = 3, "second"
    state.commit()
    state.batch = 4
    with torch.no_grad():
        state.model.weight.fill_(7.0)
    state.optimizer.param_groups[0]["lr"] = 9.0
    state.restore()
    assert (state.batch, state.name) == (3, "second")
    assert state.model.weight.item() == 1.0
    assert state.optimizer.param_groups[0]["lr"] == 2.0


@every_rank
def test_sync_gives_all_what_rank_0_has() -> None:
    state = state_of(float(hvd.rank()))
    state.batch = 10 + hvd.rank()
    state.sync()
    found = state.model.weight.item(), state.optimizer.param_groups[0]["lr"], state.batch
    assert found == (0.0, 1.0, 10)


@every_rank
def test_an_object_state_brings_by_what_it_is_given() -> None:
    state = ObjectState(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, value=hvd.rank())
    other = ObjectState(lambda saved: {"value": saved["value"] + 10}, hvd.rank, value=hvd.rank())
    state.sync()
    other.sync()
    assert (state.value, other.value) == (0, 10 + hvd.rank())


@every_rank
def test_another_model_by_the_same_name_is_saved_at_once() -> None:
    state = state_of(1.0)
    state.model = nn.Linear(2, 1, bias=False)
    weight = state.model.weight.detach().clone()
    with torch.no_grad():
        state.model.weight.fill_(7.0)
    state.restore()
    assert torch.equal(state.model.weight, weight)


def test_an_internal_error_goes_back_to_the_last_commit_and_calls_back(
    on_two: Everybody, caplog: pytest.LogCaptureFixture
) -> None:
    def act() -> tuple[list[int], list[str]]:
        seen: list[int] = []
        called: list[str] = []
        state = state_of(0.0)
        state.register_reset_callbacks([lambda: called.append(f"size {hvd.size()}")])

        @hvd.elastic.run
        def train(state: hvd.elastic.TorchState, until: int) -> str:
            while state.batch < until:
                state.batch += 1
                seen.append(state.batch)
                if state.batch == 3 and not called:
                    raise hvd.HorovodInternalError("torn")
                if state.batch % 2 == 0:
                    state.commit()
                assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
            return "done"

        assert train(state, until=4) == "done"
        return seen, called

    with caplog.at_level("INFO"):
        assert on_two(act) == [([1, 2, 3, 3, 4], ["size 2"])] * 2
    continuing = [one.levelname for one in caplog.records if "elastic: continuing with 2" in one.message]
    assert set(continuing) == {"INFO"}  # none was lost


@every_rank
def test_an_update_that_rank_0_is_told_of_starts_the_function_again() -> None:
    state, called, batches = state_of(0.0), list[str](), list[int]()
    state.register_reset_callbacks([lambda: called.append("state")])

    def train(state: hvd.elastic.TorchState) -> int:
        while state.batch < 4:
            state.batch += 1
            batches.append(state.batch)
            if state.batch == 2 and not called:
                state.on_hosts_updated(time.time(), HostUpdateResult.added)
            state.commit()
        return int(state.batch)

    assert run_fn(train, lambda: called.append("reset"))(state) == 4
    assert (called, batches) == (["reset", "state"], [1, 2, 3, 4])


def test_a_type_can_have_a_handler_of_the_scripts_own(
    on_two: Everybody, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counter:
        def __init__(self, count: int) -> None:
            self.count = count

    class CounterHandler(StateHandler):
        def __init__(self, value: Counter) -> None:
            super().__init__(value)
            self.save()

        def save(self) -> None:
            self.saved = self.value.count

        def restore(self) -> None:
            self.value.count = self.saved

        def sync(self) -> None:
            self.value.count = hvd.broadcast_object(self.value.count, 0)
            self.save()

    monkeypatch.setattr(states, "_registry", states.get_handler_registry())
    set_handler_registry([(Counter, CounterHandler), *get_handler_registry()])

    def act() -> tuple[int, int]:
        counter = Counter(5 + hvd.rank())
        state = hvd.elastic.TorchState(counter=counter, model=nn.Linear(1, 1))
        counter.count = 9
        state.restore()
        first = counter.count
        state.sync()
        return first, counter.count

    assert on_two(act) == [(5, 5), (6, 5)]


@every_rank
def test_the_sampler_deals_out_what_is_left_of_an_epoch() -> None:
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    whole = [*range(10)][hvd.rank() :: 2]
    assert list(sampler) == whole
    sampler.record_batch(0, 2)
    other = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    other.load_state_dict(sampler.state_dict())
    assert len(other) == 3
    assert list(other) == whole[2:]
    other.set_epoch(1)
    assert list(other) == whole


def test_shuffled_samplers_agree_and_pad_evenly(on_three: Everybody) -> None:
    def act() -> tuple[list[int], list[int]]:
        sampler = hvd.elastic.ElasticSampler(range(7), seed=5)
        one = list(sampler)
        sampler.set_epoch(1)
        return one, list(sampler)

    dealt = on_three(act)
    for epoch in range(2):
        samples = [sample for both in dealt for sample in both[epoch]]
        assert len(samples) == 9
        assert set(samples) == set(range(7))
    assert [one for one, _ in dealt] != [other for _, other in dealt]


def test_a_ring_that_shrinks_once_its_members_have_answered_finds_the_lost_one_later() -> None:
    ring: Any = SimpleNamespace(rank=0, size=2, members=object())
    members = RingMembership(HorovodWorld(ring, neighbourhood(0, "abc"), (0, 1, 2)))
    members._continue_with({0: 7, 1: 8, 2: 9}, 2)
    assert (members._world.members, members._lives[2]) == ((0, 1), 9)


@every_rank
def test_a_sampler_in_a_state_is_dealt_out_with_it() -> None:
    sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
    state = hvd.elastic.TorchState(sampler=sampler)
    if hvd.rank() == 0:
        sampler.record_batch(0, 2)
    state.sync()
    assert list(sampler) == [4 + hvd.rank(), 6 + hvd.rank()]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("arguments", [(), pytest.param(("reset",), marks=pytest.mark.full, id="run_fn")])
@pytest.mark.parametrize(
    "flags",
    [(), pytest.param(("--topology", "ring", "--min-workers", "1"), marks=pytest.mark.full)],
    ids=["hub", "ring"],
)
def test_training_goes_on_without_a_lost_worker_and_with_one_that_comes(
    cluster: Cluster, arguments: tuple[str, ...], flags: tuple[str, ...]
) -> None:
    server, address = cluster.server("--workers", "2", "--once", "--lease", "3")
    workers = [
        cluster.worker(
            address, "--as-horovod", *flags, "--rank", str(rank), SCRIPT, *arguments, name=f"w{rank}"
        )
        for rank in (0, 1)
    ]
    for worker in workers:
        worker.until(partial(has_printed, worker, "step 3 of 2"), "third step")
    # Rank 0 is the one that goes: whoever stays has the state, whatever its rank was.
    os.kill(workers[0].process.pid, signal.SIGKILL)
    workers[1].until(partial(has_printed, workers[1], "of 1"), "going on alone")
    joiner = cluster.worker(address, "--as-horovod", *flags, "--rank", "0", SCRIPT, *arguments, name="joiner")
    ended = [worker.done()["metrics"] for worker in (joiner, workers[1])]
    assert ended[0]["weight"] == ended[1]["weight"]
    assert ended[0]["resets"] == ended[1]["resets"] == 2
    assert [(one["removed"], one["added"]) for one in ended] == [(0, 0), (1, 1)]
    said = workers[1].out.read_text()
    steps = [int(line.split()[1]) for line in said.splitlines() if line.startswith("step")]
    assert steps == list(range(1, len(steps) + 1))  # no commit was lost
    assert "step 1 of" not in joiner.out.read_text()
    server.wait()

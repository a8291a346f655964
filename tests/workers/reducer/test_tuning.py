from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.optimizer import parameters
from hubring.workers.optimizer.distributed import DistributedOptimizer
from hubring.workers.reducer import tuning
from hubring.workers.reducer.exchange import bucket_groups
from hubring.workers.reducer.tuning import STEPS, TURNS, Tuning
from tests.support.fakes.hub import FakeHub, FakeRank
from tests.support.training.training_scripts import batches, build, loss_of, plain_step, wrap


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets so small that the test model has several, and sizes to match."""
    monkeypatch.setattr(parameters, "BUCKET_BYTES", 16)
    monkeypatch.setattr(tuning, "SIZES", (300, 16, 10**6))


def run(tuning: Tuning, cost: dict[int, float]) -> list[int]:
    """Takes steps until a size is chosen; returns what each used."""
    used = []
    while tuning.chosen is None:
        used.append(tuning.size)
        tuning.note(cost[tuning.size])
    return used


@pytest.mark.parametrize(
    ("cost", "agree", "chosen"),
    [
        ({1: 0.5, 2: 0.1, 3: 0.4}, list, 2),
        ({25: 0.1, 4: 0.096}, list, 25),
        ({1: 0.1, 2: 0.5}, lambda own: [own[0] + 1.0, own[1]], 2),
    ],
    ids=["shortest", "within the noise", "agreed"],
)
def test_the_size_with_the_shortest_steps_is_chosen(
    cost: dict[int, float], agree: Callable[[list[float]], list[float]], chosen: int
) -> None:
    """A gain within the noise does not leave the default, and ranks choose by what they agreed on."""
    trial = Tuning([*cost], agree)
    run(trial, cost)
    assert trial.chosen == trial.size == chosen
    assert trial.medians == dict(zip(cost, agree([*cost.values()]), strict=True))


def test_sizes_take_turns_and_get_the_same_number_of_steps() -> None:
    used = run(Tuning([7, 8], list), {7: 1.0, 8: 1.0})
    assert used == ([7] * STEPS + [8] * STEPS) * TURNS


def test_the_first_step_of_a_turn_and_single_outliers_do_not_count() -> None:
    trial = Tuning([1, 2], list)
    for step in range(2 * STEPS * TURNS):
        first, outlier = step % STEPS == 0, step % (2 * STEPS) == 1 and step < 4 * STEPS
        trial.note(9.0 if first or outlier else {1: 0.1, 2: 0.2}[trial.size])
    assert trial.chosen == 1


def test_a_group_is_of_one_kind_and_full_at_the_size_given() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for layer in model:
        layer.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, model, communicator=LocalCommunicator(), bucket_bytes=16)
    grouped = [
        [bucket.spec.tensors[0].name for bucket in group.buckets]
        for group in bucket_groups(optimizer._trained.reducer.buckets, 130, joined=False)
    ]
    assert grouped == [
        ["3.weight", "2.weight"],
        ["3.bias", "2.bias", "1.bias", "0.bias"],
        ["1.weight", "0.weight"],
    ]


@pytest.mark.usefixtures("small")
def test_the_chosen_group_size_is_logged_once_with_the_alternatives(caplog: pytest.LogCaptureFixture) -> None:
    rank, model = FakeRank(FakeHub(1)), build()
    optimizer = wrap(model, rank, bucket_bytes=None)
    assert len(optimizer._trained.reducer.buckets) > 3
    with caplog.at_level(logging.INFO):
        for batch in batches(3 * TURNS * STEPS + 5):
            plain_step(model, optimizer, batch)
    (line,) = [
        record.message for record in caplog.records if "gradients are sent in groups of" in record.message
    ]
    assert line.count(" ms") == 3


@pytest.mark.usefixtures("small")
def test_a_step_that_a_scaler_skips_is_not_charged_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[float] = []
    clock = iter(float(tick) for tick in (0, 1, 100, 101))

    def note(_: Tuning, seconds: float) -> bool:
        noted.append(seconds)
        return False

    monkeypatch.setattr(Tuning, "note", note)
    monkeypatch.setattr(tuning.Tuner, "_now", lambda _: next(clock))
    model = build()
    optimizer = wrap(model, FakeRank(FakeHub(1, "worker")), bucket_bytes=None)
    for overflow in (0.0, 0.0, 1.0, 0.0, 0.0):
        optimizer.zero_grad()
        loss_of(model, batches()[0]).backward()
        vars(optimizer)["found_inf"] = torch.tensor(overflow)  # as a GradScaler does
        optimizer.step()
    assert noted == [1.0, 1.0]
    assert optimizer.completed_steps == 4


@pytest.mark.usefixtures("small")
def test_time_is_taken_when_the_devices_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    optimizer = wrap(build(), FakeRank(FakeHub(1)), bucket_bytes=None)
    tuner = optimizer._trained.reducer.tuner
    assert tuner is not None
    tuner.note_step()
    assert waited == []
    device = torch.device("cuda", 1)
    monkeypatch.setattr(tuning, "devices_of", lambda _: {device})
    tuner.note_step()
    assert waited == [device]

"""Ranks whose first batches are the same, or of different sizes, are warned once."""

from __future__ import annotations

import copy

import pytest
import torch

from hubring.workers.optimizer.rank_checks import FirstBatch
from tests.support.fakes.hub import FakeHub, FakeRank
from tests.support.training.training_scripts import batches, build, loss_of, plain_step, wrap


@pytest.mark.parametrize(
    ("rows", "weight", "told"),
    [
        ([slice(0, 2), slice(2, 4)], 0, ""),
        ([slice(0, 2), slice(0, 2)], 0, "all ranks trained on the same first batch"),
        ([slice(0, 1), slice(1, 4)], 0, "the ranks' first batches have 1 to 3 rows"),
        ([slice(0, 1), slice(1, 4)], 3, ""),
    ],
)
def test_the_first_batches_are_compared_once(
    rows: list[slice], weight: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    def train(rank: FakeRank) -> None:
        model = build()
        optimizer = wrap(model, rank)
        with torch.no_grad():
            model(batches()[0])  # an evaluation is no training
        for batch in batches():
            if weight:
                optimizer.weight = weight
            plain_step(model, optimizer, batch[rows[rank.rank]])
        assert sum("first batch" in entry for entry in rank.log) == 1

    FakeHub(2).run(train)
    warned = [record.message for record in caplog.records if "first batch" in record.message]
    assert len(warned) == bool(told)
    assert all(told in text for text in warned)


def test_a_model_whose_forward_is_not_called_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    def train(rank: FakeRank) -> None:
        model = build()
        optimizer = wrap(model, rank)
        optimizer.zero_grad()
        model[0](batches()[0]).sum().backward()
        optimizer.step()

    FakeHub(2).run(train)
    assert "first batch" not in caplog.text


def test_a_copy_of_the_model_runs_and_notes_nothing() -> None:
    def train(rank: FakeRank) -> None:
        model = build()
        optimizer = wrap(model, rank)
        average = copy.deepcopy(model)
        for batch in batches():
            average(batch)
            plain_step(model, optimizer, batch)

    FakeHub(2).run(train)


def test_no_rank_waits_for_one_that_never_compares() -> None:
    """As one that joins the running job after the first step."""
    rank, model = FakeRank(FakeHub(2)), build()
    first_batch = FirstBatch(model, rank)
    loss_of(model, batches()[0]).backward()
    first_batch.compare(weighted=False)
    assert rank.log == ["allreduce first batch"]

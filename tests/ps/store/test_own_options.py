"""Parameters of one slice that have hyperparameters of their own are stepped as torch steps each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hubring.ps.core.messages import Code, Push, Refusal
from hubring.ps.core.types import HyperTable, StepHyper
from hubring.ps.optim.sums import WORTH
from hubring.ps.store.consistency import BSP
from tests.support.optimizers import CASES
from tests.support.sharded import Round, ShardedModel, numbers
from tests.support.store import ADD, hub, sender

SMALL = (1040, 5, 333, 2000, 48, 17)
LARGE = (WORTH + 37, 5, 333, 2 * WORTH, 17)
STEPS = 6


def rows(name: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    unlike = [
        options,
        {**options, "maximize": not options.get("maximize")},
        {**options, "weight_decay": 0.05},
    ]
    if name == "SGD":
        unlike[2] = {"weight_decay": 0.05}
    return unlike


def row_of(step: int, at: int) -> int:
    """Neighbors differ. Parameters change their options after half of the steps."""
    return (at + (step >= STEPS // 2)) % 3


def rounds(name: str, options: dict[str, Any], sizes: tuple[int, ...]) -> list[Round]:
    """In the last step, one parameter is absent on both ranks."""
    unlike = rows(name, options)
    return [
        Round.drawn(
            step,
            sizes,
            [(1,) if step == STEPS - 1 else ()] * 2,
            [unlike[row_of(step, at)] for at in range(len(sizes))],
        )
        for step in range(STEPS)
    ]


def prepared(name: str, sizes: tuple[int, ...]) -> ShardedModel:
    model = ShardedModel(sizes, name, BSP(), slice_bytes=4096 if sizes == SMALL else 4 * WORTH + 4096)
    model.init(numbers(0, sizes))
    return model


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        *((*case, SMALL) for case in CASES),
        *((*case, LARGE) for case in CASES if case[0] in ("SGD", "Adam", "AdamW")),  # which have loops
    ],
)
def test_neighbors_with_unlike_options_step_bitwise_as_torch(
    name: str, options: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    prepared(name, sizes).assert_as_torch(rounds(name, options, sizes))


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_restart_ends_in_the_same_bits(name: str, options: dict[str, Any]) -> None:
    steps = rounds(name, options, SMALL)[:3]
    # Still stepped one by one, which rounds otherwise.
    steps[2] = steps[2]._replace(options=[options] * len(SMALL))
    first, resumed = prepared(name, SMALL), prepared(name, SMALL)
    first.train(steps[:2])
    resumed.restore(first.save())
    for one, two in zip(first.train(steps, first=2), resumed.train(steps, first=2), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("optimizer", "table", "says"),
    [
        (
            "SGD",
            HyperTable((ADD, {**ADD, "lr": 0.5}), (0, 1)),
            "2 parameters, for a slice of 1 that SGD steps",
        ),
        ("SGD", HyperTable((ADD, {**ADD, "lr": float("inf")}), (1,)), "SGD got lr=inf"),
        ("", HyperTable((ADD, {**ADD, "lr": 0.5}), (0,)), "that no optimizer steps"),
    ],
)
def test_options_that_do_not_fit_the_slice_are_refused(optimizer: str, table: StepHyper, says: str) -> None:
    store = hub(BSP(), 1, optimizer=optimizer)
    ((_, reply),) = store.handle(Push(sender(0), 0, 0, torch.ones(4), table), "t")
    assert isinstance(reply, Refusal)
    assert reply.code is Code.BAD_REQUEST
    assert says in reply.text


def test_a_rank_with_options_of_its_own_is_named(caplog: pytest.LogCaptureFixture) -> None:
    sizes = (3, 4, 5)
    model = ShardedModel(sizes, "SGD", BSP())
    model.init(numbers(0, sizes))
    slower = {**ADD, "lr": 0.25}
    model.push(0, 0, numbers(1, sizes), HyperTable.of([ADD, ADD, slower]))
    model.push(1, 0, numbers(2, sizes), HyperTable.of([ADD, slower, slower]))
    (record,) = caplog.records
    assert f"rank 0 has lr={ADD['lr']} in step 1, and rank 1 has lr=0.25" in record.getMessage()

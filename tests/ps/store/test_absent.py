"""A parameter that had no gradient on any rank stays as it is, with its state and its count of steps."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from hubring.ps.core.messages import Push
from hubring.ps.core.optimizer_state import STEP
from hubring.ps.optim.sums import WORTH
from hubring.ps.store.consistency import ASP, BSP, BackupWorkers
from tests.support.optimizers import CASES
from tests.support.sharded import Round, ShardedModel, numbers
from tests.support.store import ADD, coded_push, hub, parameters, push, sender, values_of

SIZES = (1040, 5, 333, 2000, 48, 17)
LARGE = (WORTH + 37, 5, 333, 2 * WORTH, 17)
STEPS = 10


def patterns(sizes: tuple[int, ...], first: int) -> list[list[tuple[int, ...]]]:
    """For each step, the absent parameters of two ranks; none before step `first`."""
    dice = random.Random(7)

    def draw() -> tuple[int, ...]:
        return tuple(at for at in range(len(sizes)) if dice.random() < 0.6)

    drawn = [[draw(), draw()] for _ in range(STEPS)]
    drawn[:first] = [[(), ()]] * first
    drawn[first][1] = drawn[first][0] = (1, len(sizes) - 1)
    return drawn


def rounds(
    drawn: list[list[tuple[int, ...]]], options: dict[str, Any], sizes: tuple[int, ...] = SIZES
) -> list[Round]:
    alike = [options] * len(sizes)
    return [Round.drawn(step, sizes, absent, alike) for step, absent in enumerate(drawn)]


def begun(name: str, sizes: tuple[int, ...] = SIZES, **how: int) -> ShardedModel:
    model = ShardedModel(sizes, name, BSP(), **how)
    model.init(numbers(0, sizes))
    assert model.cut(), "some parameter should lie in two slices"
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("first", [0, 5])
def test_absent_parameters_are_skipped_as_torch_skips_them(
    name: str, options: dict[str, Any], first: int
) -> None:
    # Before the first absence the steps of a slice ignore parameters, so vectors begin elsewhere.
    begun(name).assert_as_torch(rounds(patterns(SIZES, first), options), bitwise=not first)


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_large_absent_parameters_are_skipped_by_loops_too(name: str) -> None:
    options = {"momentum": 0.9} if name == "SGD" else {"weight_decay": 0.1}
    model = begun(name, LARGE, slice_bytes=4 * WORTH + 4096)
    model.assert_as_torch(rounds(patterns(LARGE, 0)[:6], options, LARGE))


def test_the_reply_names_what_every_contributor_lacked() -> None:
    store = hub(BSP(), 2, numel=6, parameters=6, optimizer="")
    first = Push(sender(0), 0, 0, torch.full((6,), 2.0), {}, (0, 3, 4))
    assert store.handle(first, "a") == []
    deliveries = store.handle(Push(sender(1), 0, 0, torch.full((6,), 4.0), {}, (3, 4, 5)), "b")
    assert [values_of(reply).absent for _, reply in deliveries] == [(3, 4)] * 2
    assert values_of(deliveries[0].reply).values is not None
    ((_, again),) = store.handle(first, "a again")
    assert values_of(again).absent == (3, 4)
    assert parameters(store).tolist() == [3.0] * 6


def test_in_asynchronous_modes_each_push_is_its_own_round() -> None:
    store = hub(ASP(), 2)
    ((_, reply),) = store.handle(Push(sender(0), 0, 0, torch.ones(4), ADD, (0,)), "a")
    assert values_of(reply).absent == (0,)
    assert values_of(reply).version == 1
    ((_, reply),) = store.handle(push(1, 0), "b")
    assert values_of(reply).absent == ()
    assert parameters(store).tolist() == [1.0] * 4


def test_a_late_gradient_of_a_backup_round_says_nothing_about_absence() -> None:
    store = hub(BackupWorkers(1), 2)
    store.handle(Push(sender(0), 0, 0, torch.zeros(4), ADD, (0,)), "a")
    ((_, reply),) = store.handle(Push(sender(1), 0, 0, torch.ones(4), ADD, (0,)), "late")
    assert values_of(reply).absent == ()
    assert parameters(store).tolist() == [0.0] * 4


@pytest.mark.parametrize("codec", ["bf16", "fp16", "int8", "sign", "topk:0.1"])
def test_codes_of_absent_parameters_are_not_stepped_with(codec: str) -> None:
    store = hub(BSP(), 1, numel=64, codec=codec)
    for clock in range(2):
        one = coded_push(0, clock, torch.ones(64), name=codec)
        one.absent = (0,) if clock else ()
        store.handle(one, clock)
        if not clock:
            before = parameters(store)
            assert before.any()
    assert torch.equal(parameters(store), before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"), [("SGD", {"momentum": 0.9}), ("Adam", {"amsgrad": True}), ("Adagrad", {})]
)
def test_a_checkpoint_keeps_each_parameters_count_of_steps(name: str, options: dict[str, Any]) -> None:
    drawn = patterns(SIZES, 1)
    drawn[0] = [(4,), (4,)]
    steps, whole = rounds(drawn, options), begun(name)
    whole.train(steps[:6])
    expected = begun(name).train(steps)
    for shards in (1, 3):
        again = ShardedModel(SIZES, name, BSP(), shards=shards)
        again.restore(whole.save())
        for one, two in zip(again.train(steps, first=6), expected, strict=True):
            assert torch.equal(one, two)


def test_a_checkpoint_of_equal_steps_has_one_count() -> None:
    model = begun("Adam")
    model.train(rounds([[(), ()]] * 2, {}))
    for saved in model.save().values():
        assert saved.optimizer[STEP].dim() == 0
        assert saved.optimizer.keys() == {STEP, "exp_avg", "exp_avg_sq"}

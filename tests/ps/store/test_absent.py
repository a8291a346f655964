"""A parameter that had no gradient on any rank stays as it is, with its state and its count of steps."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from hubring.ps.core.messages import Code, Push
from hubring.ps.core.optimizer_state import STEP
from hubring.ps.optim.sums import WORTH
from hubring.ps.store.consistency import ASP, BSP, BackupWorkers
from tests.support.optimizers import CASES, hyper, torchs
from tests.support.sharded import ShardedModel
from tests.support.store import ADD, coded_push, hub, parameters, push, refusal_of, sender, values_of

pytestmark = pytest.mark.usefixtures("kernels")

SIZES = (1040, 5, 333, 2000, 48, 17)
LARGE = (WORTH + 37, 5, 333, 2 * WORTH, 17)
STEPS = 30


def numbers(seed: int, sizes: tuple[int, ...] = SIZES) -> Tensor:
    return torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed))


def patterns(sizes: tuple[int, ...], first: int) -> list[list[tuple[int, ...]]]:
    """For each step, the absent parameters of two ranks; none before step `first`."""
    dice = random.Random(7)

    def draw() -> tuple[int, ...]:
        return tuple(at for at in range(len(sizes)) if dice.random() < 0.6)

    drawn = [[draw(), draw()] for _ in range(STEPS)]
    drawn[:first] = [[(), ()]] * first
    drawn[first][1] = drawn[first][0] = (1, len(sizes) - 1)
    return drawn


def gradients(step: int, sizes: tuple[int, ...], absent: list[tuple[int, ...]]) -> list[Tensor]:
    """Each rank's gradient, with zeros for its absent parameters."""
    whole = [numbers(100 * step + rank, sizes) for rank in range(2)]
    for gradient, positions in zip(whole, absent, strict=True):
        for at, part in enumerate(gradient.split(sizes)):
            if at in positions:
                part.zero_()
    return whole


def by_torch(
    name: str, options: dict[str, Any], sizes: tuple[int, ...], drawn: list[list[tuple[int, ...]]]
) -> list[Tensor]:
    """Steps separate tensors; a parameter without a gradient on both ranks has `grad` None."""
    own = [torch.nn.Parameter(part.clone()) for part in numbers(0, sizes).split(sizes)]
    # torch's fused SGD fails if only some of its parameters have a momentum buffer, so each has its own.
    optimizers = [torchs(name, [parameter], options) for parameter in own]
    for step, absent in enumerate(drawn):
        one, two = gradients(step, sizes, absent)
        mean = ((one + two) / 2).split(sizes)
        for at, parameter in enumerate(own):
            parameter.grad = None if all(at in positions for positions in absent) else mean[at].clone()
            optimizers[at].step()
    return [parameter.detach() for parameter in own]


def by_hub(
    model: ShardedModel,
    name: str,
    options: dict[str, Any],
    drawn: list[list[tuple[int, ...]]],
    first: int = 0,
) -> list[Tensor]:
    sizes = tuple(tensor.numel for tensor in model.spec.tensors)
    for step in range(first, len(drawn)):
        given = gradients(step, sizes, drawn[step])
        for rank, (gradient, absent) in enumerate(zip(given, drawn[step], strict=True)):
            model.push(rank, step, gradient, hyper(name, options), absent)
    return list(model.values().split(sizes))


def compare(model: ShardedModel, ours: list[Tensor], theirs: list[Tensor], *, bitwise: bool) -> None:
    cut = model.cut()
    assert cut, "some parameter should lie in two slices"
    for at, (one, two) in enumerate(zip(ours, theirs, strict=True)):
        if bitwise and at not in cut:
            assert torch.equal(one, two), f"p{at}"
        else:
            torch.testing.assert_close(one, two, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("first", [0, 5])
def test_absent_parameters_are_skipped_as_torch_skips_them(
    name: str, options: dict[str, Any], first: int
) -> None:
    drawn = patterns(SIZES, first)
    model = ShardedModel(SIZES, name, BSP())
    model.init(numbers(0))
    # Before the first absence the steps of a slice ignore parameters, so vectors begin elsewhere.
    compare(
        model, by_hub(model, name, options, drawn), by_torch(name, options, SIZES, drawn), bitwise=not first
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_large_absent_parameters_are_skipped_by_loops_too(name: str) -> None:
    options = {"momentum": 0.9} if name == "SGD" else {"weight_decay": 0.1}
    drawn = patterns(LARGE, 0)[:6]
    model = ShardedModel(LARGE, name, BSP(), slice_bytes=4 * WORTH + 4096)
    model.init(numbers(0, LARGE))
    compare(model, by_hub(model, name, options, drawn), by_torch(name, options, LARGE, drawn), bitwise=True)


@pytest.mark.parametrize("finite", [0, 3])
def test_an_absent_parameter_keeps_its_very_bits(finite: int) -> None:
    model = ShardedModel(SIZES, "AdamW", BSP())
    model.init(numbers(0))
    options = {"weight_decay": 0.1}
    drawn: list[list[tuple[int, ...]]] = [[(), ()]] * finite
    before = by_hub(model, "AdamW", options, drawn)
    states = [model.state(piece) for piece in model.slices]
    drawn += [[(0, 3), (0, 2, 3)]] * 3
    after = by_hub(model, "AdamW", options, drawn, first=finite)
    for at, (one, two) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(one, two) == (at in (0, 3)), f"p{at}"
    for piece, state in zip(model.slices, states, strict=True):
        now = model.state(piece)
        if finite:
            assert set(now.tensors[STEP].tolist()) <= {3.0, 6.0}
            assert state.tensors[STEP].unique().tolist() == [3.0]


def test_the_order_of_arrival_and_retries_change_nothing() -> None:
    def run(order: tuple[int, int], *, repeat: bool) -> Tensor:
        model = ShardedModel(SIZES, "Adam", BSP())
        model.init(numbers(0))
        for step, absent in enumerate(patterns(SIZES, 2)[:8]):
            given = gradients(step, SIZES, absent)
            for rank in order:
                for _ in range(1 + repeat):
                    model.push(rank, step, given[rank], hyper("Adam", {}), absent[rank])
        return model.values()

    expected = run((0, 1), repeat=False)
    for order, repeat in itertools.product([(0, 1), (1, 0)], [False, True]):
        assert torch.equal(run(order, repeat=repeat), expected)


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


def test_a_parameter_that_the_slice_does_not_have_is_refused() -> None:
    store = hub(BSP(), 1)
    refusal = refusal_of(store.handle(Push(sender(0), 0, 0, torch.zeros(4), ADD, (0, 1)), "a"))
    assert refusal.code is Code.BAD_REQUEST
    assert "without a gradient for parameter 1 of the slice, which has 1" in refusal.text
    store.handle(push(0, 0), "b")
    assert parameters(store).tolist() == [1.0] * 4


def test_nothing_is_absent_if_one_contributor_has_everything() -> None:
    store = hub(BSP(), 2)
    store.handle(Push(sender(0), 0, 0, torch.zeros(4), ADD, (0,)), "a")
    deliveries = store.handle(push(1, 0), "b")
    assert [values_of(reply).absent for _, reply in deliveries] == [(), ()]
    assert parameters(store).tolist() == [0.5] * 4


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
@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_checkpoint_keeps_each_parameters_count_of_steps(name: str, options: dict[str, Any]) -> None:
    drawn = patterns(SIZES, 1)[:12]
    drawn[0] = [(4,), (4,)]
    whole = ShardedModel(SIZES, name, BSP())
    whole.init(numbers(0))
    by_hub(whole, name, options, drawn[:6])
    for shards in (1, 3):
        again = ShardedModel(SIZES, name, BSP(), shards=shards)
        again.restore(whole.save())
        ours = by_hub(again, name, options, drawn, first=6)
        theirs = ShardedModel(SIZES, name, BSP())
        theirs.init(numbers(0))
        for one, two in zip(ours, by_hub(theirs, name, options, drawn), strict=True):
            assert torch.equal(one, two)


def test_a_checkpoint_of_equal_steps_has_one_count() -> None:
    model = ShardedModel(SIZES, "Adam", BSP())
    model.init(numbers(0))
    by_hub(model, "Adam", {}, [[(), ()]] * 2)
    for saved in model.save().values():
        assert saved.optimizer[STEP].dim() == 0
        assert saved.optimizer.keys() == {STEP, "exp_avg", "exp_avg_sq"}

"""A step in one pass gives torch's very bits, and where it would not there is none."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hubring.ps.core.errors import NonFinite
from hubring.ps.core.optimizer_state import STEP
from hubring.ps.optim import fused_mean_step
from hubring.ps.optim.blocks import BLOCK_BYTES, BlockSteps
from hubring.ps.optim.fused import KERNELS, State
from hubring.ps.optim.fused_mean_step import OnePass, one_pass
from hubring.ps.optim.hyperparameters import hyper_of, kwargs_of
from hubring.ps.optim.llvm_loops import Loop
from hubring.ps.optim.loops_available import LANES, work
from hubring.ps.optim.mean_and_step import optimizer_for
from hubring.ps.optim.sums import MOST, WORTH, finite_sum, summed

SGD: list[dict[str, Any]] = [
    {"lr": 0.1, "momentum": momentum, "dampening": dampening, "weight_decay": decay, "nesterov": nesterov}
    for momentum, dampening, decay, nesterov in product((0.0, 0.9), (0.0, 0.3), (0.0, 0.01), (False, True))
    if not nesterov or (momentum and not dampening)
]
ADAM: list[dict[str, Any]] = [
    {"lr": 0.1, "betas": betas, "weight_decay": decay}
    for betas, decay in product(((0.9, 0.999), (0.6, 0.7)), (0, 0.01))
]
CASES = [
    pytest.param(name, {**options, "maximize": maximize}, id=f"{name}-{number}-{maximize}")
    for name, many in (("SGD", SGD), ("Adam", ADAM), ("AdamW", ADAM))
    for number, options in enumerate(many)
    for maximize in (False, True)
]
ROOT = Path(__file__).parents[3]
ODD = 3 * LANES + 5
"""Elements: whole vectors, and a rest that torch steps."""


def options_of(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    group = getattr(torch.optim, name)([torch.zeros(1)], **options).param_groups[0]
    return kwargs_of(hyper_of(group, name), name)


def gradients(count: int, numel: int = ODD) -> list[Tensor]:
    return [torch.randn(numel, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, MOST])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_step_in_one_pass_is_torchs_bit_by_bit(
    name: str, options: dict[str, Any], count: int, finite: bool
) -> None:
    torch_options = options_of(name, options)
    made = one_pass(name, count, torch_options, finite=finite)
    assert made is not None, (
        "a processor on which torch rounds otherwise: its kernels serve, but nothing is gained"
    )
    values, given = torch.ones(ODD), gradients(count)
    state: State = {}
    divisor = torch.tensor(float(count))
    KERNELS[name](values, summed(given, torch.empty(ODD)).clone(), state, torch_options, divisor)
    own, own_state = values.clone(), {key: tensor.clone() for key, tensor in state.items()}
    assert made.fits(own, own_state)
    for _ in range(3):
        KERNELS[name](values, summed(given, torch.empty(ODD)).clone(), state, torch_options, divisor)
        elements = made(own, given, count, own_state, torch_options)
        assert elements == pytest.approx(float(torch.stack(given).sum()) if finite else 0.0, abs=1e-3)
    assert torch.equal(own, values)
    assert own_state.keys() == state.keys()
    assert all(torch.equal(own_state[key], state[key]) for key in state)


def all_of(values: Tensor, steps: BlockSteps) -> dict[str, Tensor]:
    """Values and state, but for what blocks share."""
    return {"values": values, **{name: kept for name, kept in steps.state().tensors.items() if name != STEP}}


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, BLOCK_BYTES // 4 - 1, BLOCK_BYTES // 4 + WORTH - 1, -1])
@pytest.mark.parametrize("count", [1, 3])
def test_what_is_not_finite_is_found_in_the_pass_itself(
    wrong: float, place: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numel = BLOCK_BYTES // 4 + WORTH + 5
    hyper = hyper_of(torch.optim.AdamW([torch.zeros(1)]).param_groups[0], "AdamW")
    values, scratch = torch.ones(numel), torch.empty(numel)
    looked = list[int]()

    def note(gradients: list[Tensor], scratch: Tensor) -> Tensor:
        looked.append(gradients[0].numel())
        return finite_sum(gradients, scratch)

    monkeypatch.setattr("hubring.ps.optim.mean_and_step.finite_sum", note)
    steps = BlockSteps("AdamW", values)
    given = gradients(count, numel)
    for _ in range(2):
        steps.step(given, hyper, scratch)
    assert looked, "the first step is torch's"
    looked.clear()
    steps.step(given, hyper, scratch)
    assert not looked, "a look of its own"
    before = {name: kept[place].item() for name, kept in all_of(values, steps).items()}
    given[-1][place] = wrong
    with pytest.raises(NonFinite):
        steps.step(given, hyper, scratch)
    assert {name: kept[place].item() for name, kept in all_of(values, steps).items()} == before
    assert all(kept.isfinite().all() for kept in all_of(values, steps).values())


def test_large_slices_go_by_loops_from_their_second_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert work(), "torch's kernels serve on a machine without loops, but this one should have them"
    by_torch, by_loop = list[int](), list[int]()
    kernel, run = KERNELS["SGD"], OnePass.__call__

    def note_torch(values: Tensor, *rest: Any) -> None:
        by_torch.append(values.numel())
        kernel(values, *rest)

    def note_loop(made: OnePass, values: Tensor, given: Any, *rest: Any) -> float:
        by_loop.append(len(given))
        return run(made, values, given, *rest)

    hyper = hyper_of(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9).param_groups[0], "SGD")
    # Made now: what it is held against torch's kernel with does not count.
    one_pass("SGD", 3, kwargs_of(hyper, "SGD"), finite=True)
    monkeypatch.setitem(KERNELS, "SGD", note_torch)
    monkeypatch.setattr(OnePass, "__call__", note_loop)
    optimizer, values = optimizer_for("SGD", torch.float32, finite=True), torch.zeros(WORTH)
    for _ in range(3):
        optimizer.step(values, gradients(3, WORTH), 3, hyper, torch.empty(WORTH))
    assert (by_torch, by_loop) == ([WORTH], [3, 3])


@pytest.mark.parametrize(
    "options", [{"amsgrad": True}, {"betas": (0.5, 0.9)}, {"betas": (0.5000000001, 0.9)}]
)
def test_what_torch_does_by_another_way_is_left_to_torch(options: dict[str, Any]) -> None:
    assert one_pass("Adam", 2, options_of("Adam", options), finite=True) is None


def test_more_gradients_than_a_loop_reads_are_left_to_torch() -> None:
    assert one_pass("SGD", MOST + 1, options_of("SGD", {"momentum": 0.9}), finite=True) is None


def test_a_loop_that_rounds_otherwise_than_torch_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def round_twice(*given: Any) -> Any:
        at, one, two, three = given
        return at.add(at.mul(one, two), three)

    monkeypatch.setattr("hubring.ps.optim.llvm_loops.Arithmetic.fma", round_twice)
    fused_mean_step._sgd.cache_clear()
    with caplog.at_level(logging.INFO):
        assert one_pass("SGD", 2, options_of("SGD", {"momentum": 0.9}), finite=True) is None
    assert "SGD uses torch's kernel" in caplog.text
    fused_mean_step._sgd.cache_clear()


def test_an_optimizers_first_step_is_torchs() -> None:
    made = one_pass("SGD", 2, options_of("SGD", {"momentum": 0.9}), finite=True)
    assert isinstance(made, OnePass)
    values = torch.ones(ODD)
    assert not made.fits(values, {})
    assert not made.fits(values, {"momentum_buffer": torch.ones(ODD, dtype=torch.float64)})
    assert not made.fits(values, {"momentum_buffer": torch.ones(1)})
    assert made.fits(values, {"momentum_buffer": torch.ones(ODD)})


def test_a_loop_runs_over_whole_vectors_and_no_further() -> None:
    loop = Loop(
        1,
        1,
        ("added",),
        lambda at, _, read, number: [at.add(read[0], number["added"]), read[0]],
        adds_up=True,
    )
    changed = torch.zeros(2 * LANES + 3)
    assert loop([changed], [torch.ones(2 * LANES + 3)], {"added": 2.0}) == 2 * LANES * 1.0
    assert changed.tolist() == [3.0] * 2 * LANES + [0.0] * 3
    assert loop([changed[:3]], [torch.ones(3)], {"added": 2.0}) == 0.0
    assert changed[0] == 3.0


def test_a_loop_takes_tensors_that_begin_between_vectors() -> None:
    loop = Loop(1, 1, (), lambda at, own, read, _: [at.add(own[0], read[0])])
    changed = torch.ones(LANES + 3)
    loop([changed[3:]], [torch.ones(LANES + 1)[1:]], {})
    assert changed.tolist() == [1.0] * 3 + [2.0] * LANES


FORBIDDEN = """
import ctypes, torch
PR_SET_MDWE = 65
if ctypes.CDLL(None).prctl(PR_SET_MDWE, 1, 0, 0, 0):
    raise SystemExit(77)
from hubring.ps.optim.mean_and_step import optimizer_for
from hubring.ps.optim.sums import WORTH
from hubring.ps.optim.loops_available import work
optimizer = optimizer_for("SGD", torch.float32, finite=True)
values, scratch = torch.ones(WORTH), torch.empty(WORTH)
hyper = dict(lr=0.5, momentum=0.5, dampening=0.0, weight_decay=0.0, nesterov=0.0, maximize=0.0)
for _ in range(2):
    optimizer.step(values, [torch.ones(WORTH)] * 2, 2, hyper, scratch)
print(work(), values.unique().tolist())
"""


@pytest.mark.slow
def test_a_process_that_may_run_nothing_it_has_written_steps_by_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORBIDDEN], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    if done.returncode == 77:
        pytest.skip("a kernel before Linux 6.3 cannot forbid it")
    assert done.stdout == "False [-0.25]\n", done.stderr

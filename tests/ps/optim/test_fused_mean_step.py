"""A step in one pass gives torch's very bits, and where it would not there is none."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from llvmlite.binding import FeatureMap
from torch import Tensor

from hubring.ps.core.errors import NonFinite
from hubring.ps.core.optimizer_state import STEP
from hubring.ps.optim import fused_mean_step
from hubring.ps.optim.block_optimizers import KERNELS
from hubring.ps.optim.blocks import BLOCK_BYTES, BlockSteps
from hubring.ps.optim.fused_mean_step import State, one_pass
from hubring.ps.optim.hyperparameters import hyper_of, kwargs_of
from hubring.ps.optim.sums import MOST, WORTH, finite_sum, loops_work, summed
from tests.support.optimizers import random

SGD: list[dict[str, Any]] = [
    {"lr": 0.1, "momentum": momentum, "dampening": dampening, "weight_decay": decay, "nesterov": nesterov}
    for momentum, dampening, decay, nesterov in product((0.0, 0.9), (0.0, 0.3), (0.0, 0.01), (False, True))
    if not nesterov or (momentum and not dampening)
]
ADAM: list[dict[str, Any]] = [
    {"lr": 0.1, "betas": betas, "weight_decay": decay}
    for betas, decay in product(((0.9, 0.999), (0.6, 0.7)), (0, 0.01))
]
COUNTS = (1, 2, 3, MOST)
CASES = [
    (name, {**options, "maximize": maximize}, COUNTS[(number + maximize) % len(COUNTS)])
    for name, many in (("SGD", SGD), ("Adam", ADAM), ("AdamW", ADAM))
    for number, options in enumerate(many)
    for maximize in (False, True)
]
ROOT = Path(__file__).parents[3]
LANES = 16
"""Elements of a loop's vector."""

ODD = 3 * LANES + 5
"""Elements: whole vectors, and a rest that torch steps."""


def options_of(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    group = getattr(torch.optim, name)([torch.zeros(1)], **options).param_groups[0]
    return kwargs_of(hyper_of(group, name), name)


def gradients(count: int, numel: int = ODD) -> list[Tensor]:
    return [random(numel, seed) for seed in range(count)]


@pytest.mark.parametrize(
    ("dtype", "finite"),
    [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True), (torch.float16, True)],
    ids=str,
)
@pytest.mark.parametrize(("name", "options", "count"), CASES)
def test_a_step_in_one_pass_is_torchs_bit_by_bit(
    name: str, options: dict[str, Any], count: int, dtype: torch.dtype, finite: bool
) -> None:
    torch_options = options_of(name, options)
    writes = None if dtype is torch.float32 else dtype
    made = one_pass(name, KERNELS[name], count, torch_options, finite=finite, reads=dtype, writes=writes)
    assert made is not None, (
        "a processor on which torch rounds otherwise: its kernels serve, but nothing is gained"
    )
    values, given = torch.ones(ODD), [gradient.to(dtype) for gradient in gradients(count)]
    state: State = {}
    divisor = torch.tensor(float(count))
    KERNELS[name]([values], [summed(given, torch.empty(ODD)).clone()], [state], torch_options, divisor)
    own, own_state = values.clone(), {key: tensor.clone() for key, tensor in state.items()}
    assert made.fits(own, own_state)
    rounded = own.to(writes) if writes else None
    for _ in range(3):
        KERNELS[name]([values], [summed(given, torch.empty(ODD)).clone()], [state], torch_options, divisor)
        elements = made(own, given, count, own_state, torch_options, rounded)
        assert elements == pytest.approx(float(torch.stack(given).float().sum()) if finite else 0.0, abs=1e-3)
    assert torch.equal(own, values)
    assert rounded is None or torch.equal(rounded, own.to(dtype))
    assert own_state.keys() == state.keys()
    assert all(torch.equal(own_state[key], state[key]) for key in state)


def all_of(values: Tensor, steps: BlockSteps) -> dict[str, Tensor]:
    """Values and state, but for what blocks share."""
    return {"values": values, **{name: kept for name, kept in steps.state().tensors.items() if name != STEP}}


@pytest.mark.parametrize(("wrong", "count"), [(float("nan"), 1), (float("inf"), 3), (-float("inf"), 1)])
@pytest.mark.parametrize("place", [0, BLOCK_BYTES // 4 - 1, BLOCK_BYTES // 4 + WORTH - 1, -1])
def test_non_finite_gradients_are_detected_within_the_fused_pass(
    wrong: float, place: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numel = BLOCK_BYTES // 4 + WORTH + 5
    hyper = hyper_of(torch.optim.AdamW([torch.zeros(1)]).param_groups[0], "AdamW")
    values, scratch = torch.ones(numel), torch.empty(numel)
    looked = list[int]()

    def note(gradients: list[Tensor], scratch: Tensor) -> Tensor:
        looked.append(gradients[0].numel())
        return finite_sum(gradients, scratch)

    monkeypatch.setattr("hubring.ps.optim.block_optimizers.finite_sum", note)
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


@pytest.mark.parametrize(
    ("options", "count"),
    [({"amsgrad": True}, 2), ({"betas": (0.5, 0.9)}, 2), ({"betas": (0.5000000001, 0.9)}, 2), ({}, MOST + 1)],
)
def test_steps_outside_the_fused_pass_are_left_to_torch(options: dict[str, Any], count: int) -> None:
    assert one_pass("Adam", KERNELS["Adam"], count, options_of("Adam", options), finite=True) is None


def test_float16_is_left_to_torch_where_the_processor_does_not_convert_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: FeatureMap(f16c=False))
    options = options_of("SGD", {})
    made = partial(one_pass, "SGD", KERNELS["SGD"], 2, options, finite=True)
    assert made(reads=torch.float16, writes=torch.float16) is None
    assert made(reads=torch.float32, writes=torch.float16) is None
    assert made(reads=torch.bfloat16, writes=torch.bfloat16) is not None


def test_a_loop_that_rounds_otherwise_than_torch_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def round_twice(*given: Any) -> Any:
        at, one, two, three = given
        return at.add(at.mul(one, two), three)

    monkeypatch.setattr("hubring.ps.optim.llvm_loops.Arithmetic.fma", round_twice)
    fused_mean_step._compiled.cache_clear()
    with caplog.at_level(logging.INFO):
        assert one_pass("SGD", KERNELS["SGD"], 2, options_of("SGD", {"momentum": 0.9}), finite=True) is None
    assert "SGD uses torch's kernel" in caplog.text
    fused_mean_step._compiled.cache_clear()


@pytest.fixture
def no_llvmlite(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    loops_work.cache_clear()
    yield
    loops_work.cache_clear()


@pytest.mark.usefixtures("no_llvmlite")
def test_without_llvmlite_one_line_says_that_torchs_kernels_serve_and_what_to_install(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    options = options_of("SGD", {})
    assert not loops_work()
    assert one_pass("SGD", KERNELS["SGD"], 2, options, finite=True) is None
    (record,) = caplog.records
    assert (record.levelname, record.message) == (
        "INFO",
        "optimizers use torch's slower kernels: llvmlite is not installed; install it with: pip install"
        " llvmlite, or in a clone of Hubring: pip install '.[fast]'",
    )


FORBIDDEN = """
import ctypes, torch
PR_SET_MDWE = 65
if ctypes.CDLL(None).prctl(PR_SET_MDWE, 1, 0, 0, 0):
    raise SystemExit(77)
from hubring.ps.optim.block_optimizers import optimizer_for
from hubring.ps.optim.sums import WORTH, loops_work
optimizer = optimizer_for("SGD", finite=True)
values, scratch = torch.ones(WORTH), torch.empty(WORTH)
hyper = dict(lr=0.5, momentum=0.5, dampening=0.0, weight_decay=0.0, nesterov=0.0, maximize=0.0)
for _ in range(2):
    optimizer.step(values, [torch.ones(WORTH)] * 2, 2, hyper, scratch)
print(loops_work(), values.unique().tolist())
"""


@pytest.mark.slow
def test_a_process_that_may_run_nothing_it_has_written_steps_by_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORBIDDEN], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    if done.returncode == 77:
        pytest.skip("a kernel before Linux 6.3 cannot forbid it")
    assert done.stdout == "False [-0.25]\n", done.stderr

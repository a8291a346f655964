"""A slice steps to torch's very bits, block by block, with compiled loops and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hubring.ps.core.optimizer_state import MASTER
from hubring.ps.optim.block_optimizers import KERNELS
from hubring.ps.optim.blocks import BLOCK_BYTES, BlockSteps
from hubring.ps.optim.fused_mean_step import State
from hubring.ps.optim.hyperparameters import hyper_of, kwargs_of
from hubring.ps.optim.sums import WORTH, loops_work, summed
from tests.support.optimizers import CASES, hyper, random, torchs

pytestmark = pytest.mark.usefixtures("kernels")


def gradients(count: int, numel: int) -> list[Tensor]:
    return [random(numel, seed) for seed in range(count)]


def test_loops_serve_where_llvmlite_is_installed_and_only_there(kernels: str) -> None:
    assert loops_work() is (kernels == "loops")


@pytest.mark.parametrize(
    ("dtype", "finite"),
    [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True), (torch.float16, True)],
    ids=str,
)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_slices_of_several_blocks_train_as_torch_does_also_from_a_checkpoint(
    name: str, options: dict[str, Any], dtype: torch.dtype, finite: bool
) -> None:
    """In half precision, as torch does in float32, rounded at the end."""
    numel, count = BLOCK_BYTES // 4 + WORTH + 5, 3
    values, scratch = random(numel, 9, dtype), torch.empty(numel)
    parameter = torch.nn.Parameter(values.float().clone())
    local = torchs(name, [parameter], options)
    steps = BlockSteps(name, values, finite=finite)
    for step in range(4):
        if step == 2:
            saved = steps.state()
            steps = BlockSteps(name, values, finite=finite)
            steps.load(saved)
        given = [(gradient * (1 + step)).to(dtype) for gradient in gradients(count, numel)]
        local.param_groups[0]["lr"] = 0.1 / (1 + step)
        steps.step(given, hyper_of(local.param_groups[0], name), scratch)
        parameter.grad = summed([gradient.float() for gradient in given], torch.empty(numel)) / count
        local.step()
        assert torch.equal(values, parameter.detach().to(dtype))
    assert torch.equal(steps.stepped, parameter.detach())


def test_a_master_alone_is_loaded_without_cuts() -> None:
    """Where blocks are cut, vectors begin elsewhere and can round otherwise than on the primary."""
    steps = BlockSteps("SGD", torch.ones(8, dtype=torch.bfloat16), parameters=[slice(0, 3), slice(3, 8)])
    gradient = torch.tensor([1e-4] * 3 + [0.0] * 5).bfloat16()
    steps.step([gradient], hyper("SGD", {}), torch.empty(8))
    held = steps.state()
    assert (set(held.tensors), held.fresh) == ({MASTER}, (1,))
    steps.load(held)
    assert not steps.state().cuts


def test_elements_that_are_beyond_float32_only_together_are_stepped_with() -> None:
    hyper = hyper_of(torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=0.9).param_groups[0], "SGD")
    values, scratch = torch.zeros(WORTH), torch.empty(WORTH)
    steps = BlockSteps("SGD", values)
    large = torch.full((WORTH,), torch.finfo(torch.float32).max / 8)
    large[::3] *= -1  # whose sums in some lanes are infinities of either sign
    expected, state = torch.zeros(WORTH), State()
    for _ in range(3):
        steps.step([torch.zeros(WORTH), large], hyper, scratch)
        KERNELS["SGD"]([expected], [large.clone()], [state], kwargs_of(hyper, "SGD"), torch.tensor(2.0))
    assert torch.equal(values, expected)
    assert values.isfinite().all()

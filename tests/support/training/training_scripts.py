"""Training scripts with different kinds of steps, and a small model for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.support.fakes.hub import FakeHub, FakeRank

STEPS = 4
SMALL = 64
"""Bucket size in bytes that divides the test model into several buckets."""


SEEDING = threading.Lock()
"""Guards torch's generator, which all ranks share because they are threads."""


def build(seed: int = 0) -> nn.Sequential:
    with SEEDING:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(count: int = STEPS, rows: int = 4, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 6, generator=generator) for _ in range(count)]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def wrap(model: nn.Module, communicator: Communicator, **kwargs: Any) -> DistributedOptimizer:
    kwargs.setdefault("bucket_bytes", SMALL)
    inner = kwargs.pop("inner", None) or sgd(model)
    return DistributedOptimizer(inner, model, communicator=communicator, **kwargs)


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_same(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def assert_close(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    torch.testing.assert_close(first, second)


Step = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], None]


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def module_zero_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    loss_of(model, batch).backward()
    optimizer.step()


def clipped_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def replacing_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5
    optimizer.step()


def late_lr_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.step()


def never_zeroing_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    loss_of(model, batch).backward()
    optimizer.step()


def closure_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss.item()

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert isinstance(loss, float)


def single_server() -> FakeRank:
    return FakeRank(FakeHub(1))


def pushes_during_backward(step: Step, rank: FakeRank, **kwargs: Any) -> list[int]:
    """For every step, the number of buckets that were sent before backward returned."""
    model = build()
    optimizer = wrap(model, rank, **kwargs)
    counts: list[int] = []

    original = torch.Tensor.backward

    def backward(loss: torch.Tensor, *args: Any) -> None:
        before = len(rank.pushed)
        original(loss, *args)
        counts.append(len(rank.pushed) - before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", backward)
        for batch in batches():
            step(model, optimizer, batch)
    return counts


def number_of_buckets() -> int:
    rank = single_server()
    model = build()
    optimizer = wrap(model, rank)
    plain_step(model, optimizer, batches()[0])
    return len(rank.pushed)


def scaled_step(scaler: torch.amp.GradScaler, max_norm: float | None = None) -> Step:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()

    return step


def new_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, **kwargs)

"""hvd.SyncBatchNorm: ranks normalise as one process with all their samples would."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hubring.horovod as hvd
from tests.workers.horovod.conftest import Everybody, every_rank

PARTS = (5, 3)


def samples(dims: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(PARTS), 4, *[3] * (dims - 2), generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("dims", [2, 4])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_ranks_normalise_as_one_process(
    on_two: Everybody, dims: int, affine: bool, momentum: float | None
) -> None:
    def run(layer: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x.clone().requires_grad_()
        result = layer(x)
        (
            result * torch.linspace(0, 1, 4, dtype=x.dtype).view(1, 4, *[1] * (dims - 2)) ** 2 + result**3
        ).sum().backward()
        assert x.grad is not None
        found = {"result": result.detach(), "gradient": x.grad}
        return {**found, **layer.state_dict(), **{f"to {n}": p.grad for n, p in layer.named_parameters()}}

    def act() -> dict[str, torch.Tensor]:
        layer = hvd.SyncBatchNorm(4, momentum=momentum, affine=affine).double()
        return run(layer, samples(dims).split(PARTS)[hvd.rank()])

    whole = nn.BatchNorm2d if dims == 4 else nn.BatchNorm1d
    expected = run(whole(4, momentum=momentum, affine=affine).double(), samples(dims))
    first, second = on_two(act)
    for name, value in expected.items():
        if name in ("result", "gradient"):
            torch.testing.assert_close(torch.cat([first[name], second[name]]), value)
        elif name.startswith("to "):  # summed by whoever exchanges gradients
            torch.testing.assert_close(first[name] + second[name], value)
        else:
            torch.testing.assert_close(first[name], value)
            torch.testing.assert_close(second[name], value)


def test_a_rank_alone_takes_no_running_statistics_that_are_turned_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hubring.workers.horovod.sync_batch_norm.size", lambda: 1)
    layer = hvd.SyncBatchNorm(1).eval()
    layer.track_running_stats = False
    torch.testing.assert_close(layer(torch.tensor([[1.0], [3.0]])), torch.tensor([[-1.0], [1.0]]))


@every_rank
def test_a_rank_without_samples_takes_part() -> None:
    layer = hvd.SyncBatchNorm(2)
    layer(torch.tensor([[1.0, 2.0], [3.0, 6.0]])[: 2 * (1 - hvd.rank())])
    torch.testing.assert_close(layer.running_mean, torch.tensor([0.2, 0.4]))


@every_rank
def test_evaluation_takes_the_running_statistics() -> None:
    layer = hvd.SyncBatchNorm(2).eval()
    x = torch.full((1, 2), float(hvd.rank()))
    torch.testing.assert_close(layer(x), x / (1 + 1e-5) ** 0.5)
    with pytest.raises(ValueError, match="at least 2D"):
        layer(torch.ones(2))

"""What the small script trains, taken step by step in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.support.scripts import small


def assert_trained(
    file: Path, steps: Sequence[Sequence[int]], width: int = 16, rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    """Asserts that a file has the parameters after steps in which these ranks take part."""
    model = small.network(width)
    optimizer = small.sgd(model)
    for step, ranks in enumerate(steps):
        optimizer.zero_grad()
        torch.stack([small.loss_of(model, step, rank, width) for rank in ranks]).mean().backward()
        optimizer.step()
    trained = load_file(file)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), rtol=rtol, atol=atol)

"""Optimizers that the hub steps, with options that change a step's arithmetic."""

from __future__ import annotations

from typing import Any

import torch

from hubring.ps.core.types import Hyper
from hubring.ps.optim.hyperparameters import hyper_of

CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.01, "dampening": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "maximize": True}),
    ("Adam", {"weight_decay": 0.1, "betas": (0.8, 0.99)}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {"weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True, "eps": 1e-6}),
    ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.5}),
    ("RMSprop", {"alpha": 0.9}),
    ("RMSprop", {"centered": True, "momentum": 0.9, "weight_decay": 0.01}),
]


def random(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the same numbers for the same seed."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def torchs(name: str, parameters: list[torch.Tensor], options: dict[str, Any]) -> torch.optim.Optimizer:
    """Returns torch's optimizer with the kernel that the hub uses."""
    kernel = {"foreach": False} if name == "RMSprop" else {"fused": True}
    made: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, lr=0.05, **options, **kernel)
    return made


def hyper(name: str, options: dict[str, Any]) -> Hyper:
    """Returns the hyperparameters of `torchs` as a push has them."""
    return hyper_of(torchs(name, [torch.zeros(1)], options).param_groups[0], name)

"""Checks that all ranks of a ring have the same model, buckets and codec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import BucketSpec

Gather = Callable[[Tensor], Sequence[Tensor]]
"""Returns every rank's flat uint8 tensor, in rank order."""


def check_same_model(specs: Sequence[BucketSpec], compress: str, gather: Gather) -> None:
    """Compares this rank's buckets with those of the other ranks, which all call it.

    Raises:
        ConfigError: Two ranks differ. The error names the first difference.
    """
    mine = [f"--compress {compress or 'not given'}", *(line for spec in specs for line in _lines(spec))]
    first, *others = [bytes(text.tolist()).decode().split("\n") for text in gather(_encode(mine))]
    for rank, other in enumerate(others, start=1):
        for here, there in zip_longest(first, other, fillvalue="nothing more"):
            if here != there:
                raise ConfigError(
                    f"rank {rank} and rank 0 train different models: rank {rank} has {there}, rank 0 has"
                    f" {here}; start all ranks with the same script and arguments"
                )


def _lines(spec: BucketSpec) -> list[str]:
    """Returns one line per parameter with everything that ranks must agree on."""
    return [
        f"{tensor.name} {spec.dtype}{list(tensor.shape)} (bucket {spec.index}, group {spec.group})"
        for tensor in spec.tensors
    ]


def _encode(lines: list[str]) -> Tensor:
    return torch.frombuffer(bytearray("\n".join(lines).encode()), dtype=torch.uint8)

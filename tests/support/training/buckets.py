"""Buckets of small models, in plain memory."""

from __future__ import annotations

import torch
from torch import nn

from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.bucketing import make_buckets


def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype)


def buckets_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, bucket_bytes: int = 1 << 20
) -> list[Bucket]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return make_buckets(optimizer, model.named_parameters(), allocate, bucket_bytes, "SGD")

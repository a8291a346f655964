"""Checks that all ranks begin with the same optimizer state, where each worker steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

from hubring.ps.core.errors import ConfigError
from hubring.workers.collectives.differences import first_difference
from hubring.workers.communicators.base import Communicator


def check_same_state(optimizer: Optimizer, communicator: Communicator) -> None:
    """Compares the ranks' state, which a script may have loaded before `DistributedOptimizer`.

    Only tensors and numbers count: other objects need not look the same on all ranks.

    Raises:
        ConfigError: Two ranks differ. Each would step on its own. The error names the first difference.
    """
    if communicator.size == 1:
        return
    lines = list(_lines("state", optimizer.state_dict()["state"]))
    found = first_difference(lines, communicator, "optimizer state")
    if found is not None:
        raise ConfigError(
            f"the optimizers of rank 0 and rank {found.rank} have different state: rank 0 has"
            f" {found.rank_0_has or 'none'}, rank {found.rank} has {found.rank_has or 'none'}; load the same"
            " checkpoint on all ranks before DistributedOptimizer(...), or load it on none"
        )


def _lines(name: str, value: Any) -> Iterator[str]:
    """Returns a line for each tensor and number, as `state[0][exp_avg] float32[4, 4] checksum 1b2c3d4e`."""
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        yield f"{name} {kind} checksum {crc32(content):08x}"
    elif isinstance(value, int | float):
        yield f"{name} {value!r}"
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _lines(f"{name}[{key}]", one)
    elif isinstance(value, list | tuple):
        for place, one in enumerate(value):
            yield from _lines(f"{name}[{place}]", one)

"""Checks that all ranks begin with the same optimizer state, where each worker steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

from hubring.ps.core.errors import ConfigError
from hubring.workers.collectives.extremes import extremes
from hubring.workers.communicators.base import Communicator


def check_same_state(optimizer: Optimizer, communicator: Communicator) -> None:
    """Compares the ranks' state, which a script may have loaded before `DistributedOptimizer`.

    Raises:
        ConfigError: Two ranks differ. Each would step on its own.
    """
    if communicator.size == 1:
        return
    digest = 0
    for part in _parts(optimizer.state_dict()["state"]):
        digest = crc32(part, digest)
    least, most = extremes([digest], "optimizer state", communicator)
    if least != most:
        raise ConfigError(
            "the ranks' optimizers have different state: load the same checkpoint on all ranks before"
            " DistributedOptimizer(...), or load it on none"
        )


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield repr(key).encode()
            yield from _parts(one)
    else:
        yield repr(value).encode()

"""Chooses this worker's device: one GPU per local rank with NCCL, otherwise the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from hubring.ps.core.errors import ConfigError
from hubring.workers.launchers.placement import Placement

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Choice(NamedTuple):
    """A device's name, and the reason for the choice."""

    device: str
    why: str


def choose(backend: str, placement: Placement, environment: Mapping[str, str]) -> Choice:
    """Chooses this worker's device among the visible GPUs.

    CUDA_VISIBLE_DEVICES limits and renumbers the GPUs: its first entry is cuda:0. If it shows a single GPU,
    a launcher (srun --gpus-per-task=1) has already assigned one GPU to each worker.

    Raises:
        ConfigError: The backend needs a GPU, but there is none, or none for this local rank.
    """
    if backend != "nccl":
        return Choice("cpu", f"--backend {backend} exchanges in host memory; a script can compute on a GPU")
    if not torch.cuda.is_available():
        raise ConfigError(
            "--backend nccl needs a CUDA device, but torch finds none on this host; use --backend gloo"
        )
    count, local_rank = torch.cuda.device_count(), placement.local_rank
    if count == 1 and local_rank and _VISIBLE in environment:
        return Choice("cuda:0", f"{_VISIBLE}={environment[_VISIBLE]}, the only GPU visible to this worker")
    if local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no GPU: torch finds {count} GPU(s) on this host"
            f"{_seen(environment)}; start at most {count} worker(s) on this host"
        )
    return Choice(f"cuda:{local_rank}", f"local rank {local_rank} of {count} GPU(s){_seen(environment)}")


def _seen(environment: Mapping[str, str]) -> str:
    return f" ({_VISIBLE}={environment[_VISIBLE]})" if _VISIBLE in environment else ""

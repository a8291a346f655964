"""Which device is this worker's own: one GPU a local rank under NCCL, else the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from hubring.ps.core.errors import ConfigError
from hubring.workers.launchers.placement import Placement

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Choice(NamedTuple):
    """A device's name, and why it is this one."""

    device: str
    why: str


def choose(backend: str, placement: Placement, environment: Mapping[str, str]) -> Choice:
    """Finds this worker's own among the GPUs that it may see.

    CUDA_VISIBLE_DEVICES counts and renames, as everywhere: its first entry is cuda:0. Where it shows a
    single one, a launcher (srun --gpus-per-task=1) has given each worker its own already.

    Raises:
        ConfigError: The backend wants a GPU, and there is none, or none for this local rank.
    """
    if backend != "nccl":
        return Choice("cpu", f"--backend {backend} exchanges in host memory; a script may compute elsewhere")
    if not torch.cuda.is_available():
        raise ConfigError("--backend nccl needs a CUDA device, and torch finds none here: use --backend gloo")
    count, local_rank = torch.cuda.device_count(), placement.local_rank
    if count == 1 and local_rank and _VISIBLE in environment:
        return Choice("cuda:0", f"{_VISIBLE}={environment[_VISIBLE]}, the only one shown to this worker")
    if local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own: torch finds"
            f" {count} here{_seen(environment)}; start at most that many workers on this host"
        )
    return Choice(f"cuda:{local_rank}", f"local rank {local_rank} of {count} GPU(s){_seen(environment)}")


def _seen(environment: Mapping[str, str]) -> str:
    return f" ({_VISIBLE}={environment[_VISIBLE]})" if _VISIBLE in environment else ""

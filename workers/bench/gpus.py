"""This machine's GPUs, and the GPU of each rank."""

from __future__ import annotations

from collections.abc import Mapping

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def missing() -> str:
    """Returns why rows cannot run on a GPU; empty if they can."""
    import torch  # imported here so that listing the rows does not import torch

    return "" if torch.cuda.is_available() else "torch finds no CUDA device on this host"


def count() -> int:
    """Returns the number of GPUs that torch finds."""
    import torch

    return torch.cuda.device_count()


def variables(rank: int, size: int, gpus: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables of a rank if there are fewer GPUs than ranks; otherwise none.

    In that case all ranks use the first GPU. NCCL refuses two ranks of one host on one GPU, so each rank gets
    a different NCCL_HOSTID.
    """
    if gpus >= size:
        return {}
    return {_VISIBLE: environment.get(_VISIBLE, "0").split(",")[0], "NCCL_HOSTID": f"rank{rank}"}

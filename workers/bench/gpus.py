"""This machine's GPUs: whether there are any, and which one a rank has."""

from __future__ import annotations

from collections.abc import Mapping

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def missing() -> str:
    """Why nothing can run on a GPU here; empty where it can."""
    import torch  # late: rows are listed without it

    return "" if torch.cuda.is_available() else "torch finds no CUDA device here"


def count() -> int:
    """How many GPUs torch finds."""
    import torch

    return torch.cuda.device_count()


def variables(rank: int, size: int, gpus: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of one of `size` ranks, where there are fewer GPUs than ranks; else none.

    All ranks use the first GPU then. NCCL refuses two ranks of one host on one GPU: each claims a host of
    its own.
    """
    if gpus >= size:
        return {}
    return {_VISIBLE: environment.get(_VISIBLE, "0").split(",")[0], "NCCL_HOSTID": f"rank{rank}"}

"""The public API of training scripts, as `hubring.NAME`."""

from __future__ import annotations

from typing import Any

import torch

from hubring.ps.core.errors import HubringError as HubringError
from hubring.ps.core.messages import ReduceOp as ReduceOp
from hubring.workers import collectives
from hubring.workers.collectives import *  # noqa: F403
from hubring.workers.localrun.functions import launch as launch
from hubring.workers.optimizer.distributed import DistributedOptimizer as DistributedOptimizer
from hubring.workers.optimizer.local_updates import LocalOptimizer as LocalOptimizer
from hubring.workers.runtime import context
from hubring.workers.runtime.context import shutdown as shutdown
from hubring.workers.runtime.sampler import ShardedSampler as ShardedSampler
from hubring.workers.torch_backend.ddp_hook import ddp_hook as ddp_hook

__all__ = ["DistributedOptimizer", "HubringError", "LocalOptimizer", "ReduceOp", "ShardedSampler"]
__all__ += ["ddp_hook", "launch"]
__all__ += ["device", "init", "local_rank", "rank", "report", "shutdown", "size", "topology"]
__all__ += collectives.__all__


def init(*, aggregate: bool = False) -> None:
    """Joins the job. Call it first. See `hubring.workers.runtime.context.init` for the errors.

    Args:
        aggregate: Run the optimizer step in the script, as with `--aggregate`: the hub only averages
            gradients. Set it if the script needs the mean gradient (for example to clip its norm) or
            the optimizer's state (to save it). It changes nothing on a ring or without a server.
    """
    context.init(aggregate=aggregate)


def rank() -> int:
    """Returns this worker's rank, from 0 to `size() - 1`."""
    return context.current().communicator.rank


def size() -> int:
    """Returns the number of workers that the job started with; on a ring with `--min-workers`, those now."""
    return context.current().communicator.size


def local_rank() -> int:
    """Returns this worker's rank among the workers on its host."""
    return context.current().placement.local_rank


def topology() -> str:
    """Returns `hub`, `ring` or `local`. Use it in logs only; a script must not depend on it."""
    return context.current().communicator.topology


def device() -> torch.device:
    """Returns the device for this worker's model: its own GPU, or the CPU.

    The topology does not matter: `--accelerator` decides. By default a worker has a GPU if there is one for
    each worker on its host, or if CUDA_VISIBLE_DEVICES shows it a single one.
    """
    return context.current().device


def report(**metrics: Any) -> None:
    """Records metrics of this step: for the status page, `--report-to`, `--record` and the last line.

    Numbers become curves on the page. `samples` is the number of samples of this step; `total_steps`, or
    `progress` from 0 to 1, gives the time left.
    """
    context.current().report(metrics)

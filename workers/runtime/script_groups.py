"""What a script needs that makes a `torch.distributed` group of its own, and knows nothing of Hubring."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hubring.ps.config.environment import environment, export
from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.errors import UsageError
from hubring.ps.core.torch_internals import backends_chosen, keep_groups_with_models
from hubring.workers.launchers.known_launchers import place_variables
from hubring.workers.launchers.placement import Placement

log = logging.getLogger(__name__)

_MEETING = (
    "set MASTER_ADDR to the host of rank 0, MASTER_PORT to a free port there, and each worker's RANK and"
    " WORLD_SIZE (ps-run does so, and ps-worker --gpus on one host)"
)


def process_group_hint(error: BaseException) -> str:
    """Returns what a process group of the script needs, and what to use instead."""
    wanted = isinstance(error, ValueError) and "using env:// rendezvous" in str(error)
    use = "or use hubring.init() and hubring.DistributedOptimizer (workers/examples/FROM_DDP.md); or"
    use += " in ps-compare the rows ddp and ddp-hub"
    return f"{_MEETING}; {use}" if wanted else ""


def export_place(place: Placement) -> None:
    """Sets RANK and the like, which scripts for `torch.distributed` read, if rank and size are known now.

    `LOCAL_WORLD_SIZE` and `GROUP_RANK` stay unset if the number of this host's workers is not known: a guess
    of 1 would contradict `--local-rank 1` when `hubring.init()` reads the environment again.
    """
    if place.rank is None or place.size is None:
        return
    numbers = place_variables(place.rank, place.size, place.local_rank, place.local_size, place.node_rank)
    if not any(reading.field == "local_size" for reading in place.readings):
        del numbers["LOCAL_WORLD_SIZE"], numbers["GROUP_RANK"]
    export(numbers | environment())  # what is set stays


@contextlib.contextmanager
def no_lightning_group() -> Iterator[None]:
    """Raises where Lightning starts a process group in one of several workers that do not know where to meet.

    It reads LOCAL_RANK, and takes them for processes that will meet. But without MASTER_PORT and a launcher
    whose variables Lightning reads, each of them chooses a port of its own, and waits there for half an hour.

    Raises:
        UsageError: Lightning starts a group.
    """
    start, given = dist.init_process_group, environment()

    @functools.wraps(start)
    def checked(*arguments: Any, **options: Any) -> None:
        place = sys._getframe(1).f_locals.get("cluster_environment")
        if type(place).__name__ == "LightningEnvironment":
            raise UsageError(
                f"Lightning's ranks do not know where to meet: {_MEETING}; or use strategy='auto' and"
                " devices=1 with hubring.init(), hubring.ShardedSampler and, in configure_optimizers,"
                " hubring.DistributedOptimizer"
            )
        start(*arguments, **options)

    if "LOCAL_RANK" in given and "MASTER_PORT" not in given and given.get("WORLD_SIZE") != "1":
        dist.init_process_group = checked
    try:
        yield
    finally:
        dist.init_process_group = start


@contextlib.contextmanager
def gloo_answered(config: WorkerConfig) -> Iterator[None]:
    """With `--as-gloo` and a hub, makes groups of Hubring where Gloo is asked for, or no backend.

    A ring keeps Gloo, which is one. Gloo's groups outlive their models.
    """
    keep_groups_with_models()
    if config.as_gloo and (config.accelerator == "cpu" or not torch.cuda.is_available()):
        export({"ACCELERATE_USE_CPU": "true"} | environment())  # else its ranks train alone, each for itself
    if not config.as_gloo or config.topology == "ring":
        yield
        return
    defaults = dist.Backend.default_device_backend_map
    before = dict(defaults)
    defaults.update(cpu=_OURS, cuda=_OURS)  # for scripts that ask torch which backend a device has
    try:
        with backends_chosen(_choose):
            yield
    finally:
        defaults.update(before)


_OURS = "hubring"


def _choose(asked: str, rank: int | None, ranks: Sequence[int]) -> str:
    if ranks and dist.get_backend() != _OURS:  # beside a world on NCCL, which has not joined the job
        return asked
    names = {part.rpartition(":")[2].lower() for part in asked.split(",")}
    if names <= {"gloo", "undefined"}:
        return _OURS
    if rank == 0 and _OURS not in names:
        log.warning(
            "the script asks for the backend %s by name, so the hub takes no part in this group: --as-gloo"
            " replaces gloo, or no backend",
            asked,
        )
    return asked

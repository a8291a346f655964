"""Makes the communicator for a worker's settings, and chooses the device that it trains on.

Only this file knows all topologies. Other code uses the `Communicator` interface. The device does not depend
on the topology: it is one GPU per local rank, or the CPU.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import NamedTuple

import torch

from hubring.ps.client.client import KVClient
from hubring.ps.client.session import Session
from hubring.ps.config.declaration import only_with
from hubring.ps.config.environment import environment, let_nccl_heal
from hubring.ps.config.values import address, is_loopback
from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.errors import ConfigError
from hubring.ps.transport import registry
from hubring.ps.transport.host import host_id, towards
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.hub import PSCommunicator
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.communicators.ring.communicator import AllreduceCommunicator
from hubring.workers.communicators.ring.group import RingStore
from hubring.workers.communicators.ring.healing.generations import RingMeeting
from hubring.workers.communicators.ring.healing.healing_ring import HealingRing
from hubring.workers.launchers.placement import Placement

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_HOST = torch.device("cpu")
"""Where shared memory and Gloo exchange; gradients of a model on a GPU are copied there."""


class DeviceChoice(NamedTuple):
    """A device's name, and the reason for the choice."""

    device: str
    why: str


def choose_device(
    backend: str | None, accelerator: str, placement: Placement, environment: Mapping[str, str]
) -> DeviceChoice:
    """Chooses this worker's device among the visible GPUs.

    CUDA_VISIBLE_DEVICES limits and renumbers the GPUs: its first entry is cuda:0. If it shows a single GPU,
    a launcher (srun --gpus-per-task=1) has already assigned one GPU to each worker.

    Args:
        backend: The ring's backend: nccl needs a GPU.
        accelerator: The setting: `auto`, `cpu` or `cuda`.
        placement: This worker's place on its host.
        environment: The environment variables.

    Raises:
        ConfigError: A GPU is needed, but there is none, or none for this local rank.
    """
    if accelerator == "cpu":  # before torch looks: that starts the CUDA driver, which a fork cannot use
        return DeviceChoice("cpu", "--accelerator cpu")
    asked = "--backend nccl" if backend == "nccl" else "--accelerator cuda" if accelerator == "cuda" else ""
    count, local_rank = visible_gpus(), placement.local_rank
    workers = max(local_rank + 1, placement.local_size)
    seen = f" ({_VISIBLE}={environment[_VISIBLE]})" if _VISIBLE in environment else ""
    if asked and not count:
        other = "--backend gloo" if backend == "nccl" else "--accelerator cpu"
        raise ConfigError(
            f"{asked} needs a CUDA device, but torch finds none on this host{seen}; use {other}"
        )
    if count == 1 and workers > 1 and seen:
        return DeviceChoice("cuda:0", f"the only GPU visible to this worker{seen}")
    if not asked and count < workers:
        return DeviceChoice("cpu", f"torch finds {count} GPU(s){seen} for {workers} worker(s) on this host")
    if local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no GPU: torch finds {count} GPU(s) on this host{seen}; start at"
            f" most {count} worker(s) on this host"
        )
    return DeviceChoice(f"cuda:{local_rank}", f"local rank {local_rank} of {count} GPU(s){seen}")


_ONE_ENVIRONMENT = ("ps-run", "hubring.launch", "torchrun")
"""Launchers that show all workers of a host the same GPUs."""


def note_shared_gpu(device: torch.device, placement: Placement, workers: int) -> None:
    """Logs that the workers of this host, as the server counts them, may all have taken one GPU.

    A warning, unless CUDA_VISIBLE_DEVICES shows only one: a hub on that GPU wants it so.
    """
    if device.type == "cpu" or workers < 2:
        return
    visible = environment().get(_VISIBLE)
    placed = any(reading.field == "local_rank" for reading in placement.readings)
    if visible is not None and visible_gpus() == 1:
        if placement.launcher in _ONE_ENVIRONMENT:
            log.info("the %d workers of this host share the GPU of %s=%s", workers, _VISIBLE, visible)
    elif not placed:
        why = "the %d workers of this host may all be on %s: pass --local-rank 0, 1 and so on to them"
        log.warning(why, workers, device)


def visible_gpus() -> int:
    """Returns the number of CUDA devices that torch finds."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_gpus(wanted: int) -> None:
    """Raises ConfigError if this host has fewer GPUs than `ps-worker --gpus` asks for."""
    if (count := visible_gpus()) < wanted:
        fewer = f"start at most --gpus {count}, or " if count else ""
        raise ConfigError(
            f"--gpus {wanted}: torch finds {count} GPU(s) on this host, and each worker needs one of its own;"
            f" {fewer}add --accelerator cpu to train on the CPU"
        )


log = logging.getLogger(__name__)


def alone(config: WorkerConfig, placement: Placement) -> Communicator:
    """Returns the communicator of a worker without a server.

    Raises:
        ConfigError: The launcher started more than one worker.
    """
    if placement.size is not None and placement.size > 1:
        raise ConfigError(
            f"the job has {placement.size} workers (launcher: {placement.launcher}), but no server is set:"
            " pass --server HOST:PORT or set PS_SERVER; ps-server start prints the address"
        )
    log.info("no server set: training in this process alone")
    if config.compress:
        log.info("--compress %s has no effect: a single worker exchanges nothing", config.compress)
    return LocalCommunicator()


def connect(config: WorkerConfig, session: Session, device: torch.device) -> Communicator:
    """Returns the communicator of a worker that joined a hub or a ring."""
    _share_cores(session.neighbours)
    make = _ring if config.topology == "ring" else _hub
    communicator = make(config, session, device)
    communicator.waiting = session.waiting
    return communicator


def _share_cores(workers: int) -> None:
    """Limits torch to this worker's share of the host's cores. Workers that each use all cores slow down."""
    # A shard on the same host gets no share: shard and worker mostly take turns. Measured with one of each
    # on 2 cores and an MLP of 25 M parameters: 128 ms per step with two cores for the worker, 152 with one.
    if "OMP_NUM_THREADS" not in environment():
        share = max(1, len(os.sched_getaffinity(0)) // workers)
        torch.set_num_threads(min(share, torch.get_num_threads()))  # a script may already have set fewer


def _hub(config: WorkerConfig, session: Session, device: torch.device) -> Communicator:
    if config.local and session.mode != "bsp":
        raise only_with("--local", "a server with --mode bsp", f"--mode {session.mode}")
    transport, dial, wired = registry.choose(
        session.shards, config.transport, locate=session.locations.locate
    )
    shards = len(session.shards)
    how = "hub that averages" if config.aggregate else f"hub in mode {session.mode}"
    place = session.sender.rank, session.size, how, shards, transport.name
    log.info("rank %d of %d, %s, %d shard(s) over %s", *place)
    # A worker can be ahead of others only in lockstep, and that slows the others only on a network link.
    client = KVClient(session.sender, shards, dial, bounded=session.lockstep and wired)
    session.locations.on_move = client.reconnect
    client.on_saved = session.states.want
    communicator = PSCommunicator(
        session,
        client,
        transport,
        wired=wired,
        aggregate=config.aggregate,
        timeout=config.timeout,
        compress=config.compress or "",
        host=host_id() if config.local else "",
    )
    try:  # with the communicator, which passes the server's reason to a client that lost a shard
        client.wait_connected(config.timeout)
    except BaseException:
        client.close()
        raise
    return communicator


def _ring(config: WorkerConfig, session: Session, device: torch.device) -> Communicator:
    server, _ = address(session.address)
    host = server if is_loopback(server) else towards(server)  # works without a route to other networks
    if config.min_workers is not None:
        return _healing_ring(config, session, device, host)
    communicator = AllreduceCommunicator(
        session.sender.rank,
        session.size,
        RingStore(session.board, "ring", config.timeout),
        host=host,
        backend=config.backend,
        device=device if config.backend == "nccl" else _HOST,
        timeout=config.timeout,
        compress=config.compress or "",
        local=host_id() if config.local else "",
    )
    session.on_failure(communicator.fail)
    return communicator


def _healing_ring(config: WorkerConfig, session: Session, device: torch.device, host: str) -> Communicator:
    meeting = RingMeeting(
        session.sender.rank,
        host,
        session.board,
        backend=config.backend,
        compress=config.compress or "",
        device=device if config.backend == "nccl" else _HOST,
        timeout=config.timeout,
        local=host_id() if config.local else "",
    )
    communicator = HealingRing(meeting, late=session.late, size=session.ring_size, timeout=config.timeout)
    place = communicator.rank, communicator.size, config.min_workers
    log.info("rank %d of %d, ring that continues with at least %d workers", *place)
    session.on_ring = lambda broken, newcomers: communicator.hear(broken, newcomers=newcomers)
    session.on_failure(communicator.fail)
    return communicator


def own_device(config: WorkerConfig, placement: Placement) -> torch.device:
    """Returns the device on which this worker trains; makes it current if it is a GPU."""
    if config.backend == "nccl" and config.min_workers is not None:
        let_nccl_heal()
    choice = choose_device(config.backend, config.accelerator, placement, environment())
    device = torch.device(choice.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif config.accelerator == "auto" and visible_gpus():
        log.info("hubring.device() is the CPU: %s", choice.why)
    return device

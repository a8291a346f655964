"""The topologies: which communicator a worker's settings name, and the device that it trains on.

This is the one file that knows which topologies there are; everything else sees the interface.
"""

from __future__ import annotations

import logging
import os

import torch

from hubring.ps.client.client import KVClient
from hubring.ps.client.session import Session
from hubring.ps.config.address import address, is_loopback
from hubring.ps.config.environment import environment
from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.errors import ConfigError
from hubring.ps.transport import registry
from hubring.ps.transport.host import towards
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.hub import PSCommunicator
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.communicators.ring import AllreduceCommunicator
from hubring.workers.communicators.ring_group import ring_store
from hubring.workers.launchers.own_device import choose
from hubring.workers.launchers.placement import Placement

log = logging.getLogger(__name__)


def alone(config: WorkerConfig, placement: Placement) -> Communicator:
    """The communicator of a worker that no server is named for.

    Raises:
        ConfigError: The launcher started others beside it.
    """
    if placement.size is not None and placement.size > 1:
        raise ConfigError(
            f"{placement.launcher} started {placement.size} workers, but no server is named:"
            " give --server HOST:PORT (or PS_SERVER); ps-server start prints it"
        )
    log.info("no server named: training alone in this process")
    if config.compress:
        log.info("--compress %s: a lone worker exchanges nothing, so nothing is compressed", config.compress)
    return LocalCommunicator()


def connect(config: WorkerConfig, session: Session, device: torch.device) -> Communicator:
    """The communicator of a worker that has joined a hub or a ring."""
    _share_cores(session.neighbours)
    make = _ring if config.topology == "ring" else _hub
    communicator = make(config, session, device)
    communicator.waiting = session.waiting
    return communicator


def _share_cores(workers: int) -> None:
    """Gives torch this worker's part of the host's cores: workers that take all of them stall one another."""
    # A shard beside a worker gets no share of its own: the two mostly take turns. Measured with one of
    # each on 2 cores, an MLP of 25 M parameters: 128 ms a step with both cores to the worker, 152 with one.
    if "OMP_NUM_THREADS" not in environment():
        share = max(1, len(os.sched_getaffinity(0)) // workers)
        torch.set_num_threads(min(share, torch.get_num_threads()))  # a script may have taken fewer already


def _hub(config: WorkerConfig, session: Session, device: torch.device) -> Communicator:
    transport, dial, wired = registry.choose(session.shards, config.transport)
    log.info(
        "rank %d of %d, hub in mode %s, %d shard(s) by %s",
        session.sender.rank,
        session.size,
        session.mode,
        len(session.shards),
        transport.name,
    )
    # Only who is waited for can be ahead, and only a link makes those behind pay for it.
    client = KVClient(session.sender, len(session.shards), dial, bounded=session.lockstep and wired)
    try:
        client.wait_connected(config.timeout)
    except BaseException:
        client.close()
        raise
    return PSCommunicator(
        session,
        client,
        transport,
        wired=wired,
        aggregate=config.aggregate,
        timeout=config.timeout,
        compress=config.compress or "",
    )


def _ring(config: WorkerConfig, session: Session, device: torch.device) -> Communicator:
    server, _ = address(session.address)
    store = ring_store(
        session.sender.rank,
        server if is_loopback(server) else towards(server),  # needs no way to anywhere else
        lambda where: session.publish("ring", where),
        lambda: session.lookup("ring", config.timeout),
        config.timeout,
    )
    log.info("rank %d of %d, ring by %s", session.sender.rank, session.size, config.backend)
    communicator = AllreduceCommunicator(
        session.sender.rank,
        session.size,
        store,
        backend=config.backend,
        device=device,
        timeout=config.timeout,
        compress=config.compress or "",
    )
    session.on_failure(communicator.fail)
    return communicator


def own_device(config: WorkerConfig, placement: Placement) -> torch.device:
    """The device on which this worker trains."""
    device = torch.device(choose(config.backend, placement, environment()).device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device

"""Lets a script that uses Hubring train by a peer, in this process alone."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from hubring.ps.config.environment import environment
from hubring.ps.config.worker import WorkerConfig
from hubring.ps.observe import logs
from hubring.workers import api
from hubring.workers.compare.peers.peer import Peer
from hubring.workers.launchers.own_device import choose
from hubring.workers.launchers.placement import Placement
from hubring.workers.peers.rows import find
from hubring.workers.peers.seat import Seat
from hubring.workers.runtime import context
from hubring.workers.runtime.record import Record
from hubring.workers.runtime.worker import Worker

_MODULES = {"ddp": "ddp", "mpi": "mpi", "rpc": "served", "ray": "served"}
"""Where each peer's class is."""


class StandIn:
    """Takes the place of hub and ring: `hubring.init()` then meets the others by a peer.

    Whatever else a script uses stands on what `init` found, but for the optimizer: how and when a
    peer exchanges is its own.

    Args:
        name: The peer's.
        seat: What it is told, as far as the command line knows it.

    Raises:
        UsageError: There is no such peer, or it cannot be had here.
    """

    def __init__(self, name: str, seat: Seat) -> None:
        find(name).check()
        module = import_module(f"hubring.workers.compare.peers.{_MODULES[name]}")
        self._kind: type[Peer] = getattr(module, name.capitalize())
        self._seat = seat

    def install(self) -> None:
        """Takes the place; before the script begins."""
        context.meet_by(self._meet)
        api.DistributedOptimizer = self._kind.optimizer  # type: ignore[assignment, misc]

    def honest(self, result: dict[str, Any]) -> dict[str, Any]:
        """A worker's result with what this peer does not know as null, and how it knows its bytes."""
        if "exchange" not in result:
            return result
        unknown = {} if self._kind.exposes else {"exposed_seconds": None, "hidden_seconds": None}
        return {**result, "exchange": {**result["exchange"], **unknown, "bytes": self._kind.bytes_are}}

    def _meet(self, config: WorkerConfig, place: logs.LogOrigin, found: Placement) -> Worker:
        rank, size = self._seat.rank, self._seat.size
        placement = replace(found, rank=rank, size=size, local_rank=config.local_rank or 0)
        device = torch.device(choose(self._seat.backend, placement, environment()).device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        place.role, record = f"w{rank}", Record(config.record)
        seat = replace(self._seat, timeout=config.timeout, aggregate=config.aggregate)
        return Worker(config, placement, self._kind(seat), device, None, record, place)

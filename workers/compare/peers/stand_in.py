"""Lets a script that uses Hubring train with a peer, in this process only."""

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

_MODULES = {"rpc": "served", "ray": "served"}
"""Module of a peer's class, where it is not the peer's name."""


class StandIn:
    """Replaces hub and ring: `hubring.init()` then connects through a peer.

    The optimizer is replaced too, because each peer exchanges in its own way.

    Args:
        name: Name of the peer.
        seat: Rank, size and addresses, as far as the command line sets them.

    Raises:
        UsageError: The peer does not exist or is not available here.
    """

    def __init__(self, name: str, seat: Seat) -> None:
        find(name).check()
        module = import_module(f"hubring.workers.compare.peers.{_MODULES.get(name, name)}")
        self._kind: type[Peer] = getattr(module, name.capitalize())
        self._seat = seat

    def install(self) -> None:
        """Replaces hub and ring; call it before the script begins."""
        context.meet_by(self._meet)
        api.DistributedOptimizer = self._kind.optimizer  # type: ignore[assignment, misc]

    def honest(self, result: dict[str, Any]) -> dict[str, Any]:
        """Returns a worker's result with null for what the peer cannot measure, and how bytes are known."""
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

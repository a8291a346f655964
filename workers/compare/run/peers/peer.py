"""Common parts of all peers, and how a script that uses Hubring trains with one, in this process only."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, ClassVar, Literal

import torch

from hubring.ps.config.environment import environment
from hubring.ps.config.worker import WorkerConfig
from hubring.ps.core.counters import Traffic
from hubring.ps.core.errors import ConfigError, UsageError
from hubring.ps.core.messages import Call, Collective, Refusal
from hubring.ps.observe import logs
from hubring.ps.store.collective import Part, outcome
from hubring.workers import api
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.collectives.moving import broadcast_into
from hubring.workers.communicators.base import CollectiveWork, Communicator, ParameterState
from hubring.workers.launchers.placement import Placement
from hubring.workers.optimizer.wrapping import OptimizerWrapper
from hubring.workers.peers.rendezvous import PeerRendezvous
from hubring.workers.peers.rows import find_peer
from hubring.workers.runtime import context
from hubring.workers.runtime.topology import choose_device
from hubring.workers.runtime.training_record import Record
from hubring.workers.runtime.worker import Worker

_NOT_OFFERED = {Collective.GROUP, Collective.JOIN, Collective.TRANSFER}


class PeerCommunicator(Communicator):
    """A worker's connection to the others through another library.

    All ranks call collectives in the same order, and all take part in each. Groups, `join`, `send` and
    `recv` are not supported.

    Attributes:
        exposes: Whether its exchange time can be measured separately from compute.
        bytes_are: `counted`, or `computed` if the bytes cannot be counted.
        optimizer: Replacement for `hubring.DistributedOptimizer`.
    """

    exposes: ClassVar[bool] = True
    bytes_are: ClassVar[Literal["counted", "computed"]]
    optimizer: ClassVar[type[OptimizerWrapper]]
    tunable = False

    def __init__(self, seat: PeerRendezvous) -> None:
        self.rank, self.size = seat.rank, seat.size
        self.timeout: float = seat.timeout
        self.steps_on = "worker"
        self.traffic = Traffic()

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Returns the value of every rank, in rank order. Values must support pickle."""

    def attach(self, buckets: list[Bucket], state: Mapping[str, ParameterState] | None = None) -> int:
        """See the interface.

        Raises:
            ConfigError: Ranks have different models, or this model cannot be exchanged from host memory.
        """
        _check_memory(self.topology, buckets)
        self.check_model([bucket.spec for bucket in buckets])
        broadcast_into([bucket.values for bucket in buckets], self, "the first parameters", self.timeout)
        return 0

    def check_model(self, described: Any) -> None:
        """Compares what describes the model on every rank.

        Raises:
            ConfigError: Ranks have different models.
        """
        first, *others = self.gather(described)
        for rank, theirs in enumerate(others, start=1):
            if theirs != first:
                raise ConfigError(
                    f"rank {rank} trains another model than rank 0; start all ranks with the same script"
                )

    def take_part(self, call: Call, tensors: tuple[torch.Tensor, ...], work: CollectiveWork) -> None:
        if call.collective in _NOT_OFFERED or call.ranks:
            work.fail(UsageError(f"{call.name!r}: a peer supports neither groups nor join, send and recv"))
            return
        parts = [Part(rank, *part) for rank, part in enumerate(self.gather((call, tensors)))]
        names = [part.call.name for part in parts]
        if len(set(names)) > 1:
            work.fail(UsageError(f"ranks call {', '.join(names)}; with a peer all must call in one order"))
            return
        results = outcome(parts)
        if isinstance(results, Refusal):
            work.fail(ConfigError(results.text))
        else:
            work.deliver(results[self.rank])

    def count_passes(self, passes: int, nbytes: int) -> None:
        """Counts passes of `nbytes` around a ring: (n-1)/n of them each way.

        That is the least for gathering or reduce-scattering them, and half of an allreduce.
        """
        travels = passes * (self.size - 1) * nbytes // self.size
        self.traffic.bytes_sent += travels
        self.traffic.bytes_received += travels


def _check_memory(name: str, buckets: list[Bucket]) -> None:
    for bucket in buckets:
        first = bucket.spec.tensors[0].name
        if bucket.gradients.device.type != "cpu":
            raise ConfigError(
                f"{name} exchanges host memory, and {first} is on {bucket.gradients.device};"
                " move the model to hubring.device()"
            )
        if bucket.gradients.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"{name} exchanges float32 and float64, and {first} is {bucket.spec.dtype};"
                " keep the model in float32"
            )


_MODULES = {"ddp": "grouped", "zero1": "grouped", "mpi": "served", "rpc": "served", "ray": "served"}
"""Module of a peer's class, where it is not the peer's name."""


class StandIn:
    """Replaces hub and ring: `hubring.init()` then connects through a peer.

    The optimizer is replaced too, because each peer exchanges in its own way.

    Args:
        name: Name of the peer.
        seat: Rank, size and addresses, as far as the command line sets them.
        edited: Called when the script calls `hubring.init()`, before it joins a group.

    Raises:
        UsageError: The peer does not exist or is not available here.
    """

    def __init__(self, name: str, seat: PeerRendezvous, edited: Callable[[], None] = lambda: None) -> None:
        find_peer(name).check()
        self._edited = edited
        module = import_module(f"hubring.workers.compare.run.peers.{_MODULES.get(name, name)}")
        self._kind: type[PeerCommunicator] = getattr(module, name.capitalize())
        self._seat = seat

    def install(self) -> None:
        """Replaces hub and ring; call it before the script begins."""
        context.make_workers_by(self._meet)
        api.DistributedOptimizer = self._kind.optimizer  # type: ignore[assignment, misc]

    def honest(self, result: dict[str, Any]) -> dict[str, Any]:
        """Returns a worker's result with null for what the peer cannot measure, and how bytes are known."""
        if "exchange" not in result:
            return result
        unknown = {} if self._kind.exposes else {"exposed_seconds": None, "hidden_seconds": None}
        return {**result, "exchange": {**result["exchange"], **unknown, "bytes": self._kind.bytes_are}}

    def _meet(self, config: WorkerConfig, place: logs.LogOrigin, found: Placement) -> Worker:
        if not torch.distributed.is_initialized():
            self._edited()
        rank, size = self._seat.rank, self._seat.size
        placement = replace(found, rank=rank, size=size, local_rank=config.local_rank or 0)
        backend = self._seat.backend
        accelerator = "cuda" if backend == "nccl" else "cpu"
        device = torch.device(choose_device(backend, accelerator, placement, environment()).device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        place.role, record = f"w{rank}", Record(config.record)
        seat = replace(self._seat, timeout=config.timeout, aggregate=config.aggregate)
        return Worker(config, placement, self._kind(seat), device, None, record, place)

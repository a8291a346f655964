"""Common parts of all peers: rank, size, and collectives built on one `gather`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch

from hubring.ps.core.counters import Traffic
from hubring.ps.core.errors import ConfigError, UsageError
from hubring.ps.core.messages import Call, Collective, Refusal
from hubring.ps.store.collective import Part, outcome
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.collectives.broadcasts import broadcast_into
from hubring.workers.communicators.base import CollectiveWork, Communicator, ParameterState, Start
from hubring.workers.optimizer.wrapping import OptimizerWrapper
from hubring.workers.peers.seat import Seat

_NOT_OFFERED = {Collective.GROUP, Collective.JOIN, Collective.TRANSFER}


class Peer(Communicator):
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

    def __init__(self, seat: Seat) -> None:
        self.rank, self.size = seat.rank, seat.size
        self.timeout: float = seat.timeout
        self.steps_on = "worker"
        self.traffic = Traffic()

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Returns the value of every rank, in rank order. Values must support pickle."""

    def attach(self, buckets: list[Bucket], state: Mapping[str, ParameterState] | None = None) -> Start:
        """See the interface.

        Raises:
            ConfigError: Ranks have different models, or this model cannot be exchanged from host memory.
        """
        _check_memory(self.topology, buckets)
        first, *others = self.gather([bucket.spec for bucket in buckets])
        for rank, specs in enumerate(others, start=1):
            if specs != first:
                raise ConfigError(
                    f"rank {rank} trains another model than rank 0; start all ranks with the same script"
                )
        broadcast_into([bucket.values for bucket in buckets], self, "the first parameters", self.timeout)
        return Start()

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

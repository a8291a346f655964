"""The one interface behind which hub, ring and single process look alike.

The contract is in the parameters: after `push_pull(bucket).wait()` and the
optimizer's `step()`, the bucket's parameters are the ones to use next. Where
the optimizer runs differs, and `steps_on` says it:

    server   the hub applied the optimizer; the new parameters are in bucket.values
    worker   the mean gradient is in bucket.gradients; the worker's optimizer steps
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from ps.messages import Collective, ReduceOp
from ps.traffic import Traffic
from ps.types import Hyper
from ps.work import Work

if TYPE_CHECKING:
    from workers.bucketing import Bucket


@dataclass(slots=True)
class Start:
    """How a model begins: which step it goes on from."""

    step: int = 0


class Communicator(ABC):
    """A worker's tie to all the others."""

    topology: ClassVar[str]
    rank: int
    size: int
    steps_on: Literal["server", "worker"]
    traffic: Traffic
    timeout: float | None = None
    """Seconds that one exchange may take; None: without end."""
    late: bool = False
    """Joined a job that was running already: the others will not broadcast to it."""
    draining: bool = False
    """All workers are asked to leave after this step."""
    waiting: AbstractContextManager[object] = nullcontext()
    """Entered for as long as this rank waits for others, so that it can be told for whom."""
    tunable: bool = True
    """It takes time to exchange, so the right amount at a time may save some."""
    joins: bool = False
    """Exchanges adjacent buckets better as one; ranks must then join the same ones."""
    drains: ClassVar[bool] = False
    """May set `draining`: with the answer to the first bucket of a step, at the latest."""
    lockstep: bool = True
    """Every rank takes every step, so that all may be asked something in between."""

    @abstractmethod
    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat zeroed CPU tensor from which this topology exchanges at its best."""

    def allocate_values(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The same for parameters, which are received rather than sent."""
        return self.allocate(numel, dtype)

    @abstractmethod
    def attach(self, buckets: list[Bucket]) -> Start:
        """Agrees on the buckets with all ranks and brings rank 0's parameters into every `bucket.values`.

        Raises:
            ConfigError: Ranks, or the hub's checkpoint, hold another model; names the first difference.
        """

    @abstractmethod
    def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
        """Hands over the bucket's gradients: those of the mean loss over this rank's own batch.

        `bucket.gradients` belongs to the communicator until the work is done.
        The order in which ranks hand over their buckets may differ on the hub;
        on the ring it must be the same.
        """

    def pull(self, bucket: Bucket) -> Work:
        """Brings the newest parameters without giving a gradient; done at once where there are none newer."""
        return Work(f"the pull of bucket {bucket.spec.index}", 0)

    @abstractmethod
    def collective(
        self,
        collective: Collective,
        tensor: torch.Tensor | None,
        *,
        name: str,
        op: ReduceOp = ReduceOp.AVERAGE,
        root: int = 0,
    ) -> CollectiveWork:
        """Starts a collective in which every rank takes part under the same name."""

    @abstractmethod
    def close(self, *, finished: bool) -> None:
        """Leaves. With `finished`, the others need not wait for this rank any more."""


class CollectiveWork(Work):
    """A collective under way; `result` is there once it is done."""

    result: torch.Tensor | None = None

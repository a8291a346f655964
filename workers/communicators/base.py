"""The one interface behind which hub, ring and single process look alike.

The contract is in the parameters: after `push_pull(bucket).wait()` and the
optimizer's `step()`, the bucket's parameters are the ones to use next. Where
the optimizer runs differs, and `steps_on` says it:

    server   the hub applied the optimizer; the new parameters are in bucket.values
    worker   the mean gradient is in bucket.gradients; the worker's optimizer steps
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from hubring.ps.core.counters import Traffic
from hubring.ps.core.errors import UsageError
from hubring.ps.core.messages import Call
from hubring.ps.core.types import DTYPE_BYTES, Hyper
from hubring.ps.core.work import Work
from hubring.ps.store.collective import layout_of

if TYPE_CHECKING:
    from hubring.workers.buckets.bucketing import Bucket


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

        `bucket.gradients` belongs to the communicator until the work is done. On a GPU the answer
        may still be on its way then: `bucket.stage.arrive()` puts what is queued next behind it.
        The order in which ranks hand over their buckets may differ on the hub;
        on the ring it must be the same.
        """

    def together(self) -> AbstractContextManager[None]:
        """Entered to hand over buckets of which none is awaited before the others: they may leave as one."""
        return nullcontext()

    def pull(self, bucket: Bucket) -> Work:
        """Brings the newest parameters without giving a gradient; done at once where there are none newer.

        As after `push_pull`, the bucket's stage must `arrive` before they are used.
        """
        return Work(f"the pull of bucket {bucket.spec.index}", 0)

    def collective(self, call: Call, *tensors: torch.Tensor, then: Then | None = None) -> CollectiveWork:
        """Starts a collective in which every member takes part under the same name.

        Ranks may begin differently named ones in different orders, and from any thread.

        Args:
            call: What is to be done; `layouts` are filled in where tensors are given.
            tensors: This rank's part; theirs is the exchange until the work is done.
            then: Makes the work's result of the CPU tensors that came, which are its own to
                keep; in some other thread. None: the first one, on the device of the first given.
        """
        check_tensors(call.name, tensors)
        if tensors:
            call = replace(call, layouts=tuple(map(layout_of, tensors)))
        device = tensors[0].device if tensors else torch.device("cpu")
        work = CollectiveWork(call, then or (lambda came: came[0].to(device) if came else None), self)
        self.take_part(call, tuple(tensor.detach().cpu().contiguous() for tensor in tensors), work)
        return work

    @abstractmethod
    def take_part(self, call: Call, tensors: tuple[torch.Tensor, ...], work: CollectiveWork) -> None:
        """Brings this rank's part, in CPU memory, to the others; `work` gets what they make of it."""

    def open_group(self, ranks: tuple[int, ...]) -> None:  # noqa: B027 - only a ring has something to open
        """Makes ready for calls among these, of which this rank is one; all of them do the same now."""

    def close_group(self, ranks: tuple[int, ...]) -> None:  # noqa: B027 - as above
        """Gives back what `open_group` made; no member will call among these again."""

    def keep_parameters(self) -> None:  # noqa: B027 - only a hub lets anybody read
        """Makes what others let this process read its own; nothing is exchanged after this."""

    @abstractmethod
    def close(self, *, finished: bool) -> None:
        """Leaves. With `finished`, the others need not wait for this rank any more."""


def check_tensors(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Makes sure that all can be part of the collective of this name.

    Raises:
        UsageError: One is sparse, or of a dtype that does not travel.
    """
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise UsageError(f"{name!r}: only allreduce takes a sparse tensor; call to_dense()")
        if str(tensor.dtype).removeprefix("torch.") not in DTYPE_BYTES:
            text = f"{name!r}: {tensor.dtype} does not travel; convert it to one of"
            raise UsageError(f"{text} {', '.join(DTYPE_BYTES)}")


Then = Callable[[Sequence[torch.Tensor]], Any]
"""Makes a result of the tensors that came."""


class CollectiveWork(Work):
    """A collective under way; `result` is there once it is done.

    Waiting for it without a timeout of one's own ends with that of the communicator.
    """

    def __init__(self, call: Call, then: Then, communicator: Communicator) -> None:
        super().__init__(f"{call.collective.name.lower()} {call.name!r}")
        self.result: Any = None
        self._then = then
        self._waiting = communicator.waiting
        self._limit = communicator.timeout

    def deliver(self, tensors: Sequence[torch.Tensor]) -> None:
        """Completes the work with what came for this rank; for whoever carries it out."""
        try:
            self.result = self._then(tensors)
        except Exception as error:  # whatever it is, somebody waits for this work
            self.fail(error)
        else:
            self.complete_part()

    def wait(self, timeout: float | None = None) -> None:
        with self._waiting:
            super().wait(self._limit if timeout is None else timeout)

    def get(self, timeout: float | None = None) -> Any:
        """Waits, and returns the result; raises as `wait`."""
        self.wait(timeout)
        return self.result

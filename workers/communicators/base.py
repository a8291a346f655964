"""The interface that hub, ring and single process implement.

After `push_pull(bucket).wait()` and the optimizer's `step()`, the bucket's parameters are
updated. `steps_on` is where the optimizer runs:

    server   the hub applied the optimizer; the new parameters are in bucket.values
    worker   the mean gradient is in bucket.gradients; the worker's optimizer steps
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from hubring.ps.core.counters import Traffic
from hubring.ps.core.errors import ConfigError, UsageError
from hubring.ps.core.messages import Call, Collective
from hubring.ps.core.torch_internals import no_dense_tensor
from hubring.ps.core.types import DTYPE_BYTES, StepHyper
from hubring.ps.core.work import Work
from hubring.ps.store.collective import layout_of
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.value_memory import OwnValues, ValueMemory
from hubring.workers.communicators import residuals
from hubring.workers.communicators.residuals import Residual

if TYPE_CHECKING:
    from hubring.ps.client.client import PushRecord
    from hubring.workers.communicators.ring.healing.samples import Samples

ParameterState = Mapping[str, torch.Tensor]
"""torch's state of one parameter: tensors in its shape, and "step", a float32 without dimensions."""


class SteppingHub(ABC):
    """What a hub that steps does beside the exchange: it holds the parameters and the optimizer's state."""

    has_model: bool = False
    """Whether it holds some optimizer's parameters already."""

    @abstractmethod
    def pull(self, bucket: Bucket) -> Work:
        """Gets the newest parameters without a push. As after `push_pull`, call `bucket.arrive()` then."""

    @abstractmethod
    def write_parameters(self, bucket: Bucket, positions: Collection[int]) -> None:
        """Makes parameters that the script has changed the hub's, before its next step.

        In lockstep modes every rank makes the same change.

        Args:
            bucket: The bucket. `bucket.values` has the parameters.
            positions: The changed parameters, by position in `bucket.parameters`.

        Raises:
            ConfigError: Other workers of an asynchronous hub are live.
        """

    @abstractmethod
    def read_state(self, buckets: Sequence[Bucket]) -> dict[str, dict[str, torch.Tensor]]:
        """Returns the state of the hub's optimizer. Any rank may call it alone.

        Returns:
            torch's state by parameter name: CPU tensors in the parameter's shape, and "step", a float32
            without dimensions. Parameters that have not been stepped yet are left out.
        """

    @abstractmethod
    def write_state(self, buckets: Sequence[Bucket], states: Mapping[str, ParameterState]) -> None:
        """Replaces the state of the hub's optimizer before its next step.

        In lockstep modes every rank writes the same state. After an error on this rank, it has sent nothing.

        Args:
            buckets: All buckets of the optimizer.
            states: torch's state by parameter name. The optimizer is fresh for parameters that are left out.

        Raises:
            ConfigError: A tensor does not fit its parameter, or is missing.
        """

    @abstractmethod
    def keep_parameters(self) -> None:
        """Copies parameters out of memory that is shared with the server. Ends all exchange."""

    def record_pushes(self) -> PushRecord | None:
        """Starts to record the order of pushes to an asynchronous hub; returns None in lockstep modes."""
        return None


class ChangingMembers(ABC):
    """What a ring that heals does beside the exchange: `rank` and `size` change between two steps.

    Attributes:
        awaits_state: How many optimizers of this worker, which enters the running ring, get their state from
            its members.
        newcomers_wait: Whether this rank knows of workers that wait to enter.
    """

    awaits_state: int
    newcomers_wait: bool = False

    @abstractmethod
    def between_steps(self, step: int) -> bool:
        """Lets the members change. Every rank calls it after each step.

        Args:
            step: Completed steps.

        Returns:
            Whether newcomers have entered, which now get the state.
        """

    @abstractmethod
    def deal(self, length: int, order: Callable[[int], torch.Tensor]) -> Samples:
        """Returns what deals the samples of a dataset to the members.

        Args:
            length: Samples in the dataset.
            order: Returns the order of the samples in an epoch.
        """

    @abstractmethod
    def enter(self) -> None:
        """Enters a running job as a newcomer, before it gets the state of the others."""

    @abstractmethod
    def let_in(self) -> None:
        """Lets waiting newcomers in. All members call it, between the same two steps."""

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """Returns what a worker's result says of the members' changes."""


class Communicator(ABC):
    """Connects a worker to all other workers."""

    topology: ClassVar[str]
    backend: str = ""
    """What runs a ring's allreduce: `shm`, `gloo` or `nccl`; empty before it connects, and on a hub."""
    rank: int
    size: int
    steps_on: Literal["server", "worker"]
    traffic: Traffic
    timeout: float | None = None
    """Seconds that one exchange may take; None: no limit."""
    used: bool = False
    """Whether there was a collective."""
    late: bool = False
    """Whether this worker joined a running job. The other workers do not broadcast to it."""
    stepping_hub: SteppingHub | None = None
    """The hub, where it steps: `steps_on` is `server`."""
    members: ChangingMembers | None = None
    """What changes the members, if they can be lost and enter."""
    draining: bool | None = None
    """Whether all workers must stop after this step. It can become True at the latest with the answer to the
    first bucket of a step; None where it never does."""
    waiting: AbstractContextManager[object] = nullcontext()
    """Entered while this rank waits for other ranks, so that the session can log which ones."""
    tunable: bool = True
    """Whether the number of bytes sent together affects the speed."""
    waits_soon: bool = False
    """Whether the thread that calls `push_pull` waits for it next, before anything else needs the answers."""
    joins: bool = False
    """Whether adjacent buckets are faster as one exchange. Ranks must then join the same buckets."""
    sums_presence: ClassVar[bool] = False
    """Whether `Bucket.presence` travels with gradients. Otherwise the communicator sets `Bucket.absent`."""
    weighs: ClassVar[bool] = False
    """Whether `push_pull` weighs gradients by `Bucket.weight`."""
    lockstep: bool = True
    """Whether every rank takes every step, so that ranks can run a collective in each step."""
    registry: object | None = None
    """Finds the reducers of parameters; `hubring.workers.reducer.reducer` makes it."""
    registries: list[Any] | None = None
    """All registries of a hub: that of its steps, and those of what averages beside it."""

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a flat zeroed CPU tensor in the memory that this topology exchanges fastest."""
        return torch.zeros(numel, dtype=dtype, device="cpu")

    def allocate_values(self, numel: int, dtype: torch.dtype, device: torch.device) -> ValueMemory:
        """Returns flat zeroed memory for parameters on a device."""
        if device.type == "cpu":
            return OwnValues(self.allocate(numel, dtype))
        return OwnValues(torch.zeros(numel, dtype=dtype, device=device))

    @abstractmethod
    def attach(self, buckets: list[Bucket], state: Mapping[str, ParameterState] | None = None) -> int:
        """Compares the buckets with all ranks and copies rank 0's parameters to every `bucket.values`.

        Later buckets, whose indices follow those of the earlier ones, belong to the same optimizer. All ranks
        attach them between the same two steps.

        Args:
            buckets: The buckets.
            state: Rank 0's optimizer state by parameter name, with which a hub that steps begins. A running
                or restored job ignores it.

        Returns:
            The completed steps, from which training continues.

        Raises:
            ConfigError: Another rank or the hub's checkpoint has another model. The error names the
                first difference.
        """

    def averaging(self, why: str, *, again: bool = False) -> Communicator:
        """Returns what averages gradients so that the workers step, where a hub that steps cannot.

        Args:
            why: What the hub cannot do.
            again: Whether it is for the optimizer of the attached buckets, which were in no step.

        Raises:
            ConfigError: The hub is asynchronous.
        """
        if self.steps_on == "server":
            raise ConfigError(why)
        return self

    @abstractmethod
    def push_pull(self, bucket: Bucket, hyper: StepHyper) -> Work:
        """Sends the bucket's gradients: those of the mean loss over this rank's own batch.

        Parameters in `bucket.absent` have no gradient on this rank. Where workers step, `absent` or
        `presence` then tells which have none on any rank. Where the hub steps, it does not step those.

        `bucket.gradients` belongs to the communicator until the work is done. On a GPU the answer
        may still be in flight then: call `bucket.arrive()` before you use it. On a ring all
        ranks must send their buckets in the same order; on a hub the order may differ.
        """

    def gradients_moved(self, buckets: Sequence[Bucket]) -> None:  # noqa: B027 - most hold no tensor of a bucket
        """Learns that attached buckets have other memory for gradients. Nothing is in flight.

        What is left of earlier gradients, as in error feedback, stays.
        """

    def residuals(self) -> Iterable[Residual]:
        """Returns what compression has left out of the steps so far."""
        return ()

    def read_residuals(self) -> dict[str, torch.Tensor]:
        """Returns copies of the residuals, whole, by name. Nothing is in flight."""
        return residuals.read(self.residuals())

    def write_residuals(self, whole: Mapping[str, torch.Tensor]) -> bool:
        """Restores what `read_residuals` returned on this rank of an earlier job, before its next step.

        Returns:
            False if some of it is missing, which then starts at zero.
        """
        return residuals.write(self.residuals(), whole)

    def together(self) -> AbstractContextManager[None]:
        """Returns a context that batches sends. Inside it no bucket may be waited for."""
        return nullcontext()

    def collective(
        self, call: Call, *tensors: torch.Tensor, then: Then | None = None, waits: bool = False
    ) -> CollectiveWork:
        """Starts a collective, which every member must call with the same name.

        Ranks may start collectives with different names in different orders and from any thread.

        Args:
            call: The operation. With `tensors`, `layouts` is filled in.
            tensors: This rank's inputs. Do not change them before the work is done.
            then: Makes the work's result from the received CPU tensors, which it owns. It runs in
                another thread. None: the first received tensor, on the device of the first input.
            waits: Whether the caller waits next, so that no other thread needs to be woken for it.
        """
        check_tensors(call.name, tensors)
        if tensors:
            call = replace(call, layouts=tuple(map(layout_of, tensors)))
        device = tensors[0].device if tensors else torch.device("cpu")
        work = CollectiveWork(call, then or (lambda came: came[0].to(device) if came else None), self)
        work.waits = waits
        self.take_part(call, tuple(map(_plain, tensors)), work)
        return work

    @abstractmethod
    def take_part(self, call: Call, tensors: tuple[torch.Tensor, ...], work: CollectiveWork) -> None:
        """Sends this rank's tensors (in CPU memory) to the members; `work` gets the result."""

    def broadcast_parameters(self, buckets: Sequence[Bucket]) -> None:
        """Copies rank 0's parameters to every `bucket.values`."""
        for bucket in buckets:
            given = [bucket.values] if self.rank == 0 else []
            call = Call(Collective.BROADCAST, f"parameters of bucket {bucket.spec.index}")
            bucket.values.copy_(self.collective(call, *given).get())

    def open_group(self, ranks: tuple[int, ...]) -> None:  # noqa: B027 - only a ring needs it
        """Prepares for collectives among `ranks`, which include this rank. All members call it together."""

    def close_group(self, ranks: tuple[int, ...]) -> None:  # noqa: B027 - only a ring needs it
        """Releases what `open_group` made. No member may start a collective among `ranks` afterwards."""

    def is_held(self) -> bool:
        """Whether what this rank waits for certainly needs other ranks: none of it is on its way."""
        return False

    @abstractmethod
    def close(self, *, finished: bool) -> None:
        """Leaves. With `finished`, all exchanges are done and connections close cleanly."""


def check_tensors(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Checks that tensors can be inputs of a collective.

    Raises:
        UsageError: A tensor is none, is sparse or has an unsupported dtype.
    """
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"{name!r}: the tensor is a {type(tensor).__name__}; pass a torch.Tensor")
        if kind := no_dense_tensor(tensor):
            only = "; only allreduce supports sparse tensors" if kind.startswith("sparse") else ""
            raise UsageError(f"{name!r}: the tensor is {kind}: pass a dense tensor with values{only}")
        if str(tensor.dtype).removeprefix("torch.") not in DTYPE_BYTES:
            text = f"{name!r}: dtype {tensor.dtype} is not supported; convert the tensor to one of"
            raise UsageError(f"{text} {', '.join(DTYPE_BYTES)}")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor in CPU memory, whose bytes can be viewed."""
    tensor = tensor.detach().resolve_neg().cpu().contiguous()
    # A tensor of one element counts as contiguous whatever its strides, but view(dtype) needs stride 1.
    return tensor.as_strided(tensor.shape, (1,) * tensor.dim()) if tensor.numel() == 1 else tensor


Then = Callable[[Sequence[torch.Tensor]], Any]
"""Makes a result from the received tensors."""


class CollectiveWork(Work):
    """A collective in flight. `result` is set once the work is done.

    The default timeout of `wait` is the communicator's.
    """

    began: int | None = None
    """When all ranks had called it and the exchange began, by `time.perf_counter_ns`; None: unknown."""

    waits: bool = False
    """Whether the thread that called it waits for it next, and can `attend`."""

    def __init__(self, call: Call, then: Then, communicator: Communicator) -> None:
        super().__init__(f"{call.collective.name.lower()} {call.name!r}")
        self.result: Any = None
        self._then = then
        self._waiting = communicator.waiting
        self._limit = communicator.timeout
        communicator.used = True

    def deliver(self, tensors: Sequence[torch.Tensor]) -> None:
        """Completes the work with the tensors received for this rank. The communicator calls it."""
        try:
            self.result = self._then(tensors)
        except Exception as error:  # any error: a caller waits for this work
            self.fail(error)
        else:
            self.complete_part()

    def wait(self, timeout: float | None = None) -> None:
        with self._waiting:
            super().wait(self._limit if timeout is None else timeout)

    def get(self, timeout: float | None = None) -> Any:
        """Waits and returns the result. Raises as `wait`."""
        self.wait(timeout)
        return self.result


def transfer_call(name: str, source: int, to: int) -> Call:
    """Returns the call with which one rank sends and another one receives.

    It has a direction: one name may be in use in both directions at once.
    """
    named = f"{name} from {source} to {to}"
    return Call(Collective.TRANSFER, named, root=source, ranks=tuple(sorted((source, to))))


def receiver(call: Call) -> int:
    """Returns the rank that receives; the root sends."""
    return next(rank for rank in call.ranks if rank != call.root)


def moved(call: Call, source: int, to: int) -> Call:
    """Returns the call of the same transfer between ranks with other numbers."""
    name = call.name.removesuffix(f" from {call.root} to {receiver(call)}")
    return replace(transfer_call(name, source, to), layouts=call.layouts)

"""Peer `ddp`: torch's DistributedDataParallel on the script's model, and torch's optimizer.

`replicate` applies DDP to a model without wrapping it, so parameter names do not change and scripts keep
working. Gradients are views of DDP's buckets, which saves a copy. DDP waits within backward, so the wait
cannot be separated from compute and no exposed time is reported.

Gloo's threads release the tensors of an exchange some time after its end, and need the interpreter for that.
Doing so during interpreter shutdown aborts the process. Only destroying the process group joins these
threads, so nothing can hold a reference to the group: models are released, and modules that use a group as
a default argument are imported before there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
import torch.distributed.nn.functional
from torch.distributed._composable import replicate  # type: ignore[attr-defined]
from torch.nn import Module

from hubring.ps.core.errors import ConfigError, UsageError
from hubring.ps.core.types import Hyper
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.collectives.broadcasts import broadcast_into
from hubring.workers.compare.peers.peer import Peer
from hubring.workers.optimizer.wrapping import OptimizerWrapper
from hubring.workers.peers import process_group
from hubring.workers.peers.seat import Seat
from hubring.workers.runtime import context


class DdpOptimizer(OptimizerWrapper):
    """torch's optimizer on a model that DDP replicates from now on.

    Takes the arguments of `hubring.DistributedOptimizer` that DDP has a counterpart of, and ignores those
    that only make Hubring faster.

    Attributes:
        completed_steps: Number of completed steps.
        ahead: Steps by which other ranks can be ahead: 0.
        exchange_seconds: 0, because it cannot be measured.

    Raises:
        ConfigError: There is no model, or DDP does not support an option.
    """

    exchange_seconds = 0.0

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: Module | None = None,
        *,
        backward_passes_per_step: int = 1,
        uneven: bool = False,
        after_step: Callable[[int], None] | None = None,
        **_: Any,
    ) -> None:
        super().__init__(optimizer)
        if model is None:
            raise ConfigError("DDP needs the model: hubring.DistributedOptimizer(optimizer, model)")
        if uneven or backward_passes_per_step != 1:
            raise ConfigError(
                "row ddp supports neither uneven=True nor backward_passes_per_step above 1; remove them"
            )
        here = context.current()
        assert isinstance(here.communicator, Ddp)
        self.completed_steps, self.ahead = 0, 0
        self._peer = here.communicator
        self._after_step = after_step or here.step_completed
        self.named_parameters = _trained(optimizer, model.named_parameters())
        self._nbytes = sum(parameter.nbytes for parameter in self.named_parameters.values())
        self._begin_slow = here.watch(self.named_parameters.values())  # its hooks must run before DDP's
        self._start_from_rank_0(model, here.device)
        here.adopt(self)
        self._begin_slow(0)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step with the mean gradients from backward."""
        loss = self.wrapped.step(closure)
        self._peer.count_allreduce(self._nbytes)
        self.completed_steps += 1
        self._after_step(self.completed_steps)
        self._begin_slow(self.completed_steps)
        return loss

    def settle(self) -> None:
        """Does nothing: a step leaves no exchange in progress."""

    def refresh(self) -> None:
        """Does nothing: parameters are up to date."""

    def _start_from_rank_0(self, model: Module, device: torch.device) -> None:
        """Starts from rank 0's state. DDP broadcasts parameters; buffers are broadcast here, once."""
        buffers = [buffer.data for buffer in model.buffers()]
        broadcast_into(buffers, self._peer, "model.rest", self._peer.timeout)
        replicate(model, device_id=device, gradient_as_bucket_view=True)
        replicate.state(model).lazy_init()  # on all ranks now, rather than in the first forward
        self._peer.replicated.append(model)


class Ddp(Peer):
    """The default process group of torch.

    Attributes:
        replicated: Models that refer to the group until `close`.
    """

    topology = "ddp"
    exposes = False
    bytes_are = "computed"
    optimizer = DdpOptimizer

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self.replicated: list[Module] = []
        process_group.join(seat)

    def gather(self, value: Any) -> list[Any]:
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
        raise UsageError("DDP exchanges gradients itself; use hubring.DistributedOptimizer")

    def close(self, *, finished: bool) -> None:
        if not finished:  # destroying the group could wait forever
            return
        try:
            for model in self.replicated:
                release(model)
            self.replicated.clear()
        finally:
            dist.destroy_process_group()


def release(model: Module) -> None:
    """Removes DDP from a model, which keeps its parameters, and its reference to the process group."""
    state: Any = replicate.state(model)
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is state]:
            del hooks[key]
    # Other references to the module cannot use it any more; its reducer would hold the group.
    vars(state._ddp).clear()


def _trained(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]]
) -> dict[str, torch.Tensor]:
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return {name: parameter for name, parameter in named if parameter in held and parameter.requires_grad}

"""Peer `ddp`: torch's DistributedDataParallel on the script's own model, and torch's own optimizer.

`replicate` applies DDP to a model without wrapping it, so the names of its
parameters stay, and with them the script. Gradients live in DDP's buckets,
DDP's own way to save a copy. What backward waits for is DDP's own affair and
cannot be told from computing, so no exposed time is reported.

Gloo's threads give up a finished exchange's tensors some time after its end, and need the
interpreter for that: one that does so while the interpreter ends aborts the process. Only the
end of the group joins them, so nothing may keep it: models are released, and what takes the group
of its time for a default is imported before there is one.
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
from hubring.workers.buckets.bucketing import Bucket
from hubring.workers.collectives.broadcasts import broadcast_into
from hubring.workers.compare.peers.peer import Peer
from hubring.workers.optimizer.wrapping import OptimizerWrapper
from hubring.workers.peers import process_group
from hubring.workers.peers.seat import Seat
from hubring.workers.runtime import context


class DdpOptimizer(OptimizerWrapper):
    """torch's optimizer, on a model that DDP replicates from here on.

    Takes what `hubring.DistributedOptimizer` takes, except for what DDP has no counterpart of;
    what only makes ours faster is not heard.

    Attributes:
        completed_steps: Steps taken.
        ahead: By how many steps others may be ahead: none.
        exchange_seconds: Nothing that could be measured.

    Raises:
        ConfigError: There is no model, or something is asked for that DDP does not do.
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
            raise ConfigError("row ddp has neither uneven=True nor several backward passes a step")
        here = context.current()
        assert isinstance(here.communicator, Ddp)
        self.completed_steps, self.ahead = 0, 0
        self._peer = here.communicator
        self._after_step = after_step or here.step_completed
        self.named_parameters = _trained(optimizer, model.named_parameters())
        self._nbytes = sum(parameter.nbytes for parameter in self.named_parameters.values())
        self._begin_slow = here.watch(self.named_parameters.values())  # its hooks stand before DDP's
        self._start_from_rank_0(model, here.device)
        here.adopt(self)
        self._begin_slow(0)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step with the mean gradients that backward has left."""
        loss = self.wrapped.step(closure)
        self._peer.count_allreduce(self._nbytes)
        self.completed_steps += 1
        self._after_step(self.completed_steps)
        self._begin_slow(self.completed_steps)
        return loss

    def synchronize(self) -> None:
        """Does nothing: a step leaves nothing under way."""

    def refresh(self) -> None:
        """Does nothing: the newest parameters are here."""

    def _start_from_rank_0(self, model: Module, device: torch.device) -> None:
        """DDP brings rank 0's parameters as it is made; buffers come here, once, as with our own rows."""
        buffers = [buffer.data for buffer in model.buffers()]
        broadcast_into(buffers, self._peer, "model.rest", self._peer.timeout)
        replicate(model, device_id=device, gradient_as_bucket_view=True)
        replicate.state(model).lazy_init()  # now, on all ranks, and not in somebody's first forward
        self._peer.replicated.append(model)


class Ddp(Peer):
    """torch's default process group.

    Attributes:
        replicated: Models that keep the group, until `close`.
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
        raise UsageError("DDP exchanges by itself: use hubring.DistributedOptimizer")

    def close(self, *, finished: bool) -> None:
        if not finished:  # it would wait for what may never come
            return
        try:
            for model in self.replicated:
                release(model)
            self.replicated.clear()
        finally:
            dist.destroy_process_group()


def release(model: Module) -> None:
    """Takes DDP off a model, which keeps its parameters and may go on alone; DDP lets go of its group."""
    state: Any = replicate.state(model)
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is state]:
            del hooks[key]
    # Whoever still has the module has nothing of it: its reducer would keep the group.
    vars(state._ddp).clear()


def _trained(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]]
) -> dict[str, torch.Tensor]:
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return {name: parameter for name, parameter in named if parameter in held and parameter.requires_grad}

"""Common parts of peers on torch's default process group: the exchange is part of backward and `step()`.

torch waits within its own calls, so the wait cannot be separated from compute, and no exposed time is
reported.

Gloo's threads release the tensors of an exchange some time after its end, and need the interpreter for that.
Doing so during interpreter shutdown aborts the process. Only destroying the process group joins these
threads, so nothing can hold a reference to the group: models are released, and modules that use a group as
a default argument are imported before there is one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor
from torch.nn import Module

from hubring.ps.core.errors import ConfigError, UsageError
from hubring.ps.core.types import Hyper
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.compare.peers.peer import Peer
from hubring.workers.optimizer.wrapping import OptimizerWrapper
from hubring.workers.peers import process_group
from hubring.workers.peers.seat import Seat
from hubring.workers.runtime import context


class Grouped(Peer):
    """The default process group of torch.

    Attributes:
        backend: Its backend: `gloo` or `nccl`.
        prepares: Called before each collective of the script.
        releases: Called by `close`, to remove references to the group.
    """

    exposes = False
    bytes_are = "computed"

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self.backend = seat.backend
        self.prepares: list[Callable[[], None]] = []
        self.releases: list[Callable[[], None]] = []
        process_group.join(seat)

    def gather(self, value: Any) -> list[Any]:
        for prepare in self.prepares:
            prepare()
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def push_pull(self, bucket: Bucket, hyper: Hyper) -> Work:
        raise UsageError(
            f"{self.topology} exchanges gradients itself; use hubring.DistributedOptimizer(optimizer, model)"
        )

    def close(self, *, finished: bool) -> None:
        if not finished:  # destroying the group could wait forever
            return
        try:
            for release in self.releases:
                release()
            self.releases.clear()
        finally:
            dist.destroy_process_group()


class GroupedOptimizer(OptimizerWrapper):
    """torch's optimizer on a model that torch distributes from now on.

    Takes the arguments of `hubring.DistributedOptimizer` that torch has a counterpart of, and ignores those
    that only make Hubring faster.

    Attributes:
        completed_steps: Number of completed steps.
        ahead: Steps by which other ranks can be ahead: 0.
        exchange_seconds: 0, because it cannot be measured.

    Raises:
        ConfigError: There is no model, or the peer does not support an option.
    """

    exchange_seconds = 0.0

    @property
    @abstractmethod
    def named_parameters(self) -> dict[str, Tensor]:
        """The trained parameters by name."""

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
        here = context.current()
        assert isinstance(here.communicator, Grouped)
        self._peer = here.communicator
        name = self._peer.topology
        if model is None:
            raise ConfigError(f"{name} needs the model: hubring.DistributedOptimizer(optimizer, model)")
        if uneven or backward_passes_per_step != 1:
            raise ConfigError(
                f"row {name} supports neither uneven=True nor backward_passes_per_step above 1; remove them"
            )
        self.completed_steps, self.ahead = 0, 0
        self._after_step = after_step or here.step_completed
        self._begin_slow = self._distribute(model, here.device)
        here.adopt(self)
        self._begin_slow(0)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step with the mean gradients from backward."""
        loss = self._take(closure)
        self.completed_steps += 1
        self._after_step(self.completed_steps)
        self._begin_slow(self.completed_steps)
        return loss

    def settle(self) -> None:
        """Does nothing: a step leaves no exchange in progress."""

    def refresh(self) -> None:
        """Does nothing: parameters are up to date."""

    @abstractmethod
    def _distribute(self, model: Module, device: torch.device) -> Callable[[int], None]:
        """Makes torch distribute the model; returns what `Worker.watch` returns."""

    @abstractmethod
    def _take(self, closure: Callable[[], Any] | None) -> Any:
        """Takes a step with torch, and counts the bytes."""

    def _trained(self, model: Module) -> dict[str, Tensor]:
        """Returns the model's parameters that the optimizer trains, by name."""
        held = {parameter for group in self.param_groups for parameter in group["params"]}
        return {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter in held and parameter.requires_grad
        }

    def _share(self, tensors: list[Tensor]) -> None:
        """Overwrites tensors with rank 0's, one after another.

        Raises:
            ConfigError: Ranks have different models.
        """
        shapes, *others = self._peer.gather([(one.shape, one.dtype) for one in tensors])
        for rank, theirs in enumerate(others, start=1):
            if theirs != shapes:
                raise ConfigError(
                    f"rank {rank} trains another model than rank 0; start all ranks with the same script"
                )
        for one in tensors:
            sent = one.to(context.current().device).contiguous()
            if sent.numel():
                dist.broadcast(sent.view(-1).view(torch.uint8), src=0)  # Gloo does not know every dtype
                one.copy_(sent)

"""Peers on torch's default process group: `ddp` and `zero1`, and what they share with `fsdp2`.

torch waits within its own calls, so the wait cannot be separated from compute, and no exposed time is
reported.

Gloo's threads release the tensors of an exchange some time after its end, and need the interpreter for that.
Doing so during interpreter shutdown aborts the process. Only destroying the process group joins these
threads, so nothing can hold a reference to the group: models are released, and modules that use a group as
a default argument are imported before there is one.

`ddp` replicates the script's model without wrapping it, so parameter names do not change and scripts keep
working. Gradients are views of DDP's buckets, which saves a copy.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed._composable import replicate  # type: ignore[attr-defined]
from torch.nn import Module

from hubring.ps.core.errors import ConfigError, UsageError
from hubring.ps.core.types import StepHyper
from hubring.ps.core.work import Work
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.compare.run.peers.peer import PeerCommunicator
from hubring.workers.optimizer.wrapping import OptimizerWrapper
from hubring.workers.peers import rendezvous
from hubring.workers.peers.rendezvous import PeerRendezvous
from hubring.workers.runtime import context


class Grouped(PeerCommunicator):
    """The default process group of torch.

    Attributes:
        backend: Its backend: `gloo` or `nccl`.
        prepares: Called before each collective of the script.
        releases: Called by `close`, to remove references to the group.
    """

    exposes = False
    bytes_are = "computed"

    def __init__(self, seat: PeerRendezvous) -> None:
        super().__init__(seat)
        self.backend = seat.backend
        self.prepares: list[Callable[[], None]] = []
        self.releases: list[Callable[[], None]] = []
        self._joined = not dist.is_initialized()
        if self._joined:  # else the script made the group
            rendezvous.join(seat)

    def gather(self, value: Any) -> list[Any]:
        for prepare in self.prepares:
            prepare()
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def push_pull(self, bucket: Bucket, hyper: StepHyper) -> Work:
        raise UsageError(
            f"{self.topology} exchanges gradients itself; use hubring.DistributedOptimizer(optimizer, model)"
        )

    def close(self, *, finished: bool) -> None:
        if not (finished and self._joined):  # after an error, destroying the group could wait forever
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
        super().__init__(optimizer, model)
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

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise ConfigError(f"row {self._peer.topology} averages ranks equally; remove optimizer.weight")
        super().__setattr__(name, value)

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
        self._peer.check_model([(one.shape, one.dtype) for one in tensors])
        for one in tensors:
            sent = one.to(context.current().device).contiguous()
            if sent.numel():
                dist.broadcast(sent.view(-1).view(torch.uint8), src=0)  # Gloo does not know every dtype
                one.copy_(sent)


class DdpOptimizer(GroupedOptimizer):
    """torch's optimizer on a model that DDP replicates."""

    @property
    def named_parameters(self) -> dict[str, Tensor]:
        """The trained parameters by name."""
        return self._named

    def _distribute(self, model: Module, device: torch.device) -> Callable[[int], None]:
        self._named = self._trained(model)
        self._nbytes = sum(parameter.nbytes for parameter in self._named.values())
        begin = context.current().watch(self._named.values())  # its hooks must run before DDP's
        # DDP broadcasts parameters. Buffers are broadcast here, once.
        self._share([buffer.data for buffer in model.buffers()])
        replicate(model, device_id=device, gradient_as_bucket_view=True)
        replicate.state(model).lazy_init()  # on all ranks now, rather than in the first forward
        self._peer.releases.append(partial(release, model))
        return begin

    def _take(self, closure: Callable[[], Any] | None) -> Any:
        self._peer.count_passes(2, self._nbytes)
        return self.wrapped.step(closure)


class Ddp(Grouped):
    """The process group of DDP."""

    topology = "ddp"
    optimizer = DdpOptimizer


class Zero1Optimizer(DdpOptimizer):
    """The script's optimizer, with its state divided among the workers.

    Every worker has all parameters and all gradients. It keeps the optimizer's state of some whole
    parameters, steps only these, and broadcasts them.

    Raises:
        ConfigError: The optimizer already has a state.
    """

    def _distribute(self, model: Module, device: torch.device) -> Callable[[int], None]:
        if self.had_state:
            raise ConfigError(
                "row zero1 divides the optimizer's state before the first step, and this optimizer has one;"
                " wrap it before it takes a step or loads a state"
            )
        from torch.distributed.optim import ZeroRedundancyOptimizer

        begin = super()._distribute(model, device)
        kind = type(self.wrapped)
        accepted = signature(kind).parameters
        self._divided = ZeroRedundancyOptimizer(
            [dict(group) for group in self.param_groups],
            optimizer_class=kind,
            parameters_as_bucket_view=len({one.dtype for one in self.named_parameters.values()}) == 1,
            **{name: value for name, value in self.defaults.items() if name in accepted},
        )
        self._divided.param_groups = self.param_groups  # it takes the options of each step from them
        self._peer.releases.append(lambda: vars(self._divided).clear())  # it refers to the group
        return begin

    def _take(self, closure: Callable[[], Any] | None) -> Any:
        self._peer.count_passes(3, self._nbytes)  # DDP's allreduce, and the stepped parameters
        return self._divided.step(closure)


class Zero1(Grouped):
    """The process group of DDP and of torch's ZeroRedundancyOptimizer."""

    topology = "zero1"
    optimizer = Zero1Optimizer

    def __init__(self, seat: PeerRendezvous) -> None:
        import_module("torch.distributed.optim")  # before there is a group: it is a default argument there
        super().__init__(seat)


def release(model: Module) -> None:
    """Removes DDP from a model, which keeps its parameters, and its reference to the process group."""
    state: Any = replicate.state(model)
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is state]:
            del hooks[key]
    # Other references to the module cannot use it any more; its reducer would hold the group.
    vars(state._ddp).clear()

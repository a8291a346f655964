"""Peer `ddp`: torch's DistributedDataParallel on the script's model, and torch's optimizer.

`replicate` applies DDP to a model without wrapping it, so parameter names do not change and scripts keep
working. Gradients are views of DDP's buckets, which saves a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed._composable import replicate  # type: ignore[attr-defined]
from torch.nn import Module

from hubring.workers.compare.peers.grouped import Grouped, GroupedOptimizer
from hubring.workers.runtime import context


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


def release(model: Module) -> None:
    """Removes DDP from a model, which keeps its parameters, and its reference to the process group."""
    state: Any = replicate.state(model)
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is state]:
            del hooks[key]
    # Other references to the module cannot use it any more; its reducer would hold the group.
    vars(state._ddp).clear()

"""Peer `zero1`: torch's ZeroRedundancyOptimizer on a model that DDP replicates.

Every worker has all parameters and all gradients. It keeps the optimizer's state of some whole parameters,
steps only these, and broadcasts them.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import Module

from hubring.ps.core.errors import ConfigError
from hubring.workers.compare.peers.ddp import DdpOptimizer
from hubring.workers.compare.peers.grouped import Grouped


class Zero1Optimizer(DdpOptimizer):
    """The script's optimizer, with its state divided among the workers.

    Raises:
        ConfigError: The optimizer already has a state.
    """

    def _distribute(self, model: Module, device: torch.device) -> Callable[[int], None]:
        if self.had_state:
            raise ConfigError(
                "row zero1 divides the optimizer's state before the first step, and this optimizer has one;"
                " wrap it before it takes a step or loads a state"
            )
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
    """The process group of DDP and the optimizer."""

    topology = "zero1"
    optimizer = Zero1Optimizer

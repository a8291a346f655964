"""What the forward pass waits for, where a step leaves its exchange under way.

As ByteScheduler's and BytePS's crossing of the global barrier (Peng et al.,
SOSP 2019): the exchange of one step hides behind the next step's forward too.
A hook before each module's forward waits for that module's parameters alone.

The law: between two steps nobody reads a parameter that is on its way. Modules
with a forward of their own are waited for by it. Parameters of a module whose
forward does not run (`nn.MultiheadAttention` reads those of its `out_proj`) are
waited for by the nearest module around it that does run; which these are, the
first step tells. Without gradients, as in evaluation, modules may take other
ways, so there everything is waited for; so it is before `state_dict`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ps.errors import ConfigError
from workers.bucketing import Bucket
from workers.exchange import Exchange


class ForwardGuard:
    """Lets every module of a model wait for its own parameters' buckets.

    Hooks are plain functions, which `copy.deepcopy` of the model leaves as they are.

    Args:
        model: Whose forward is watched from now on.
        buckets: Where its parameters lie.
        exchange: What is waited for.
    """

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket], exchange: Exchange) -> None:
        self._model = model
        self._exchange = exchange
        self._bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        self._needs: dict[nn.Module, set[int]] = {module: set() for module in model.modules()}
        self._buckets = buckets
        self._ran: set[nn.Module] = set()
        self._waited_for: set[nn.Parameter] = set()
        self._watching = [self._watch(module) for module in self._needs]
        for module in self._needs:
            _settle_before_copies(module, exchange)

    def begin(self) -> None:
        """Lets modules wait, now that one step has shown which of them run.

        Raises:
            ConfigError: No module that holds some parameter runs its forward, so nothing would wait.
        """
        self.give_up()
        self._visit(self._model, None)
        for bucket in self._buckets:
            for tensor, parameter in zip(bucket.spec.tensors, bucket.parameters, strict=True):
                if parameter not in self._waited_for:
                    raise ConfigError(
                        f"cross_barrier: no module around {tensor.name} ran its forward in the first step, so"
                        " nothing could wait for it: call the model itself, or leave out cross_barrier=True"
                    )
        for module, needs in self._needs.items():
            if needs:
                self._guard(module, [self._buckets[index] for index in sorted(needs, reverse=True)])

    def give_up(self) -> None:
        """Watches no longer."""
        for handle in self._watching:
            handle.remove()

    def _visit(self, module: nn.Module, around: nn.Module | None) -> None:
        """Gives each parameter below `module` to whom it must be waited for by."""
        runs = module if module in self._ran else around
        if runs is not None:
            own = [one for one in module.parameters(recurse=False) if one in self._bucket_of]
            needs = {self._bucket_of[parameter].spec.index for parameter in own}
            self._waited_for.update(own)
            self._needs[runs] |= needs
            self._needs[module] |= needs  # it may run in a later step
        for child in module.children():
            self._visit(child, runs)

    def _watch(self, module: nn.Module) -> Any:
        ran = self._ran

        def note(module: nn.Module, _: object) -> None:
            ran.add(module)

        return module.register_forward_pre_hook(note, prepend=True)

    def _guard(self, module: nn.Module, needs: list[Bucket]) -> None:
        exchange = self._exchange

        def wait(_module: nn.Module, _: object) -> None:
            if not torch.is_grad_enabled():
                exchange.settle_all()
                return
            for bucket in needs:
                exchange.settle(bucket)

        module.register_forward_pre_hook(wait, prepend=True)


def _settle_before_copies(module: nn.Module, exchange: Exchange) -> None:
    """Whoever copies all parameters, out or in, finds them all at home."""

    def settle(*_: object) -> None:
        exchange.settle_all()

    module.register_state_dict_pre_hook(settle)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(settle)  # type: ignore[no-untyped-call]

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

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hubring.ps.core.errors import ConfigError
from hubring.workers.buckets.bucketing import Bucket
from hubring.workers.optimizer.exchange import Exchange


class Hook:
    """What a module calls before its forward, or before it is copied.

    A module that is copied or pickled takes its hooks along. The copy's parameters
    are its own and wait for nothing, so its hooks do nothing.
    """

    def __init__(self, act: Callable[[nn.Module], None]) -> None:
        self._act = act

    def __call__(self, module: nn.Module, *_: object) -> None:
        self._act(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_rest,)


class ForwardGuard:
    """Lets every module of a model wait for its own parameters' buckets.

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
        self._order: dict[nn.Module, list[int]] = {}
        """The buckets that each module waits for, front layers first."""
        self._ran: set[nn.Module] = set()
        self._waited_for: set[nn.Parameter] = set()
        self._watching = [
            module.register_forward_pre_hook(Hook(self._note), prepend=True) for module in self._needs
        ]
        self._waiting = [handle for module in self._needs for handle in self._before_copies(module)]

    def begin(self) -> None:
        """Lets modules wait, now that one step has shown which of them run.

        Raises:
            ConfigError: No module that holds some parameter runs its forward, so nothing would wait.
        """
        self._end_watching()
        self._visit(self._model, None)
        for bucket in self._buckets:
            for tensor, parameter in zip(bucket.spec.tensors, bucket.parameters, strict=True):
                if parameter not in self._waited_for:
                    raise ConfigError(
                        f"cross_barrier: no module around {tensor.name} ran its forward in the first step, so"
                        " nothing could wait for it: call the model itself, or leave out cross_barrier=True"
                    )
        self._order = {module: sorted(needs, reverse=True) for module, needs in self._needs.items()}
        self._waiting += [
            module.register_forward_pre_hook(Hook(self._wait), prepend=True)
            for module, needs in self._needs.items()
            if needs
        ]

    def give_up(self) -> None:
        """Watches no longer, and waits for nothing."""
        self._end_watching()
        for handle in self._waiting:
            handle.remove()

    def _end_watching(self) -> None:
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

    def _note(self, module: nn.Module) -> None:
        if torch.is_grad_enabled():  # an evaluation may take other ways than training
            self._ran.add(module)

    def _wait(self, module: nn.Module) -> None:
        if not torch.is_grad_enabled():
            self._exchange.settle_all()
            return
        for index in self._order[module]:
            self._exchange.settle(self._buckets[index])

    def _before_copies(self, module: nn.Module) -> list[RemovableHandle]:
        """Whoever copies all parameters, out or in, finds them all at home."""
        settle = Hook(lambda _: self._exchange.settle_all())
        return [
            module.register_state_dict_pre_hook(settle),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(settle),  # type: ignore[no-untyped-call]
        ]


def _rest(_: nn.Module) -> None:
    """There is nothing to wait for."""

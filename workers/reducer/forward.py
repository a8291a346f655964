"""Makes the forward pass wait for parameters that a step left in flight.

This is the cross-barrier scheme of ByteScheduler and BytePS (Peng et al., SOSP 2019): the
exchange of one step overlaps with the next step's forward. A hook before each module's
forward waits for that module's parameters only.

Invariant: no parameter is read while it is in flight. If a module's forward does not run
(`nn.MultiheadAttention` reads the parameters of its `out_proj` directly), the nearest
enclosing module that runs waits for its parameters. The first step shows which modules run.
Without gradients, as in evaluation, other modules may run, so every forward waits for all
parameters. `state_dict` waits for all parameters too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hubring.ps.core.errors import ConfigError
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.reducer.exchange import Exchange


class ForwardGuard:
    """Makes every module of a model wait for the buckets of its parameters.

    Args:
        model: The model. Recording of its forwards starts at once.
        buckets: Buckets of its parameters, in the order in which they are sent.
        exchange: Settles the buckets.
    """

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket], exchange: Exchange) -> None:
        self._model = model
        self._exchange = exchange
        self._bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        self._needs: dict[nn.Module, set[Bucket]] = {module: set() for module in model.modules()}
        self._buckets = buckets
        self._order: dict[nn.Module, list[Bucket]] = {}
        """The buckets that each module waits for, front layers first."""
        self._ran: set[nn.Module] = set()
        self._waited_for: set[nn.Parameter] = set()
        self._watching = [
            module.register_forward_pre_hook(ModuleHook(self._note), prepend=True) for module in self._needs
        ]
        self._waiting = [handle for module in self._needs for handle in self._before_copies(module)]

    def check(self) -> None:
        """Finds what each module must wait for, after one step has shown which modules run.

        Raises:
            ConfigError: A parameter has no enclosing module that runs its forward.
        """
        self._visit(self._model, None)
        for bucket in self._buckets:
            for name, parameter in bucket.named_parameters:
                if parameter not in self._waited_for:
                    raise ConfigError(
                        f"cross_barrier=True: no module that contains {name} ran its forward in the"
                        " first step, so nothing can wait for it: call the model itself, or remove"
                        " cross_barrier=True"
                    )

    def begin(self) -> None:
        """Makes modules wait from now on. Raises as `check`."""
        self.check()
        self._end_watching()
        front_first = list(reversed(self._buckets))
        self._order = {
            module: [bucket for bucket in front_first if bucket in needs]
            for module, needs in self._needs.items()
        }
        self._waiting += [
            module.register_forward_pre_hook(ModuleHook(self._wait), prepend=True)
            for module, needs in self._needs.items()
            if needs
        ]

    def remove_hooks(self) -> None:
        """Removes all hooks."""
        self._end_watching()
        for handle in self._waiting:
            handle.remove()

    def _end_watching(self) -> None:
        for handle in self._watching:
            handle.remove()

    def _visit(self, module: nn.Module, around: nn.Module | None) -> None:
        """Assigns each parameter below `module` to the module that must wait for it."""
        runs = module if module in self._ran else around
        if runs is not None:
            own = [one for one in module.parameters(recurse=False) if one in self._bucket_of]
            needs = {self._bucket_of[parameter] for parameter in own}
            self._waited_for.update(own)
            self._needs[runs] |= needs
            self._needs[module] |= needs  # it may run in a later step
        for child in module.children():
            self._visit(child, runs)

    def _note(self, module: nn.Module, *_: object) -> None:
        if torch.is_grad_enabled():  # an evaluation can run other modules than training
            self._ran.add(module)

    def _wait(self, module: nn.Module, *_: object) -> None:
        if not torch.is_grad_enabled():
            self._exchange.settle_all()
            return
        for bucket in self._order[module]:
            self._exchange.settle(bucket)

    def _before_copies(self, module: nn.Module) -> list[RemovableHandle]:
        """Makes `state_dict` and `load_state_dict` wait for all parameters."""
        settle = ModuleHook(lambda *_: self._exchange.settle_all())
        return [
            module.register_state_dict_pre_hook(settle),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(settle),  # type: ignore[no-untyped-call]
        ]


class ModuleHook:
    """A hook that a module calls, before its forward for example.

    Copying or pickling a module copies its hooks. The copy has its own parameters, which are not
    exchanged, so the copied hook does nothing.

    Args:
        act: Called with all that torch passes to the hook.
    """

    def __init__(self, act: Callable[..., None]) -> None:
        self._act = act

    def __call__(self, *given: object) -> None:
        self._act(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, (_do_nothing,)


def _do_nothing(*_: object) -> None:
    """Does nothing."""

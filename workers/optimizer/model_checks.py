"""Checks of the model that an optimizer trains: what it is, and that nothing in it trains otherwise.

A model can exchange gradients itself, or parts of it can be in no optimizer, also in parts that it got later.
Every rank finds the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.torch_internals import fused_sgd, objects_of
from hubring.workers.communicators.base import Communicator
from hubring.workers.reducer.groups import parameters_of

log = logging.getLogger(__name__)


# At the start.

_AVERAGING = {
    "DistributedDataParallel": "averages gradients too: leave it out, and use the module that it wraps"
    " (workers/examples/FROM_DDP.md); or leave DistributedOptimizer out, and run the script with --as-gloo"
    " (workers/examples/FRAMEWORKS.md)",
    "DeepSpeedEngine": "averages gradients too: leave it out, and use the module that it wraps",
    "FullyShardedDataParallel": "shards parameters over ranks: leave it out",
    "FSDPModule": "shards parameters over ranks: leave out fully_shard",
}
"""Classes of modules that exchange gradients on their own, and what to do."""

registrations = 0
"""How many modules and parameters this process has registered in modules."""

_averaging: WeakSet[torch.nn.Module] = WeakSet()
"""Modules around others that exchange gradients on their own."""


def _averages(kind: type) -> str:
    """Returns which class of `_AVERAGING` a module's class is or extends; or an empty string."""
    return next((one.__name__ for one in kind.__mro__ if one.__name__ in _AVERAGING), "")


def _note_registration(module: torch.nn.Module, *_: object) -> None:
    global registrations
    registrations += 1
    if _averages(type(module)):
        _averaging.add(module)


register_module_parameter_registration_hook(_note_registration)
register_module_module_registration_hook(_note_registration)
if torch.distributed.is_available() and torch.distributed.is_initialized():
    # Such modules need a group, so only now there can be some that the script made before it used Hubring.
    _averaging.update(one for one in objects_of(torch.nn.Module) if _averages(type(one)))


def check_model(model: object, optimizer: Optimizer, communicator: Communicator, *, named: bool) -> None:
    """Checks that `model` is a module or None, whose gradients nothing else exchanges or seems to.

    Args:
        model: What the script passed.
        optimizer: Its optimizer.
        communicator: Connects the ranks.
        named: Whether the script passed `named_parameters` too.

    Raises:
        ConfigError: It is something else, or something does, or its parameters have two names.
    """
    if not isinstance(model, torch.nn.Module | None):
        raise ConfigError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module: call"
            " DistributedOptimizer(optimizer, model); for parameters of several models call"
            " DistributedOptimizer(optimizer, named_parameters=...)"
        )
    if model is not None and named:
        raise ConfigError(
            "the model and named_parameters both name the parameters: leave named_parameters out; or leave"
            " the model out, if the optimizer has parameters that the model does not have"
        )
    if communicator.size > 1:
        model = torch.nn.Module() if model is None else model
        check_averaging(model, parameters_of(optimizer))
        _check_batch_norm(model)


def check_averaging(model: torch.nn.Module, held: Iterable[Tensor]) -> None:
    """Checks that nothing in a model, or around it or these parameters, exchanges their gradients too.

    Raises:
        ConfigError: Something does.
    """
    parameters = {*model.parameters(), *held} if _averaging else set()
    around = [one for one in _averaging if not parameters.isdisjoint(one.parameters())]
    for module in (*model.modules(), *around):
        if kind := _averages(type(module)):
            raise ConfigError(
                f"the model is in a {kind}, which {_AVERAGING[kind]}. Hubring averages the gradients of whole"
                " parameters itself (deploy/SUPPORT.md)"
            )


def _check_batch_norm(model: torch.nn.Module) -> None:
    """Checks that no layer believes that it synchronizes over ranks and does not.

    torch's SyncBatchNorm uses torch.distributed. Without a process group it is an ordinary BatchNorm,
    silently.

    Raises:
        ConfigError: The model has such a layer.
    """
    if torch.distributed.is_initialized():
        return
    for name, module in model.named_modules():
        if type(module) is torch.nn.SyncBatchNorm:
            raise ConfigError(
                f"{name or 'the model'} is a torch.nn.SyncBatchNorm, which would not synchronize: it needs"
                " torch.distributed. Use hubring.horovod.SyncBatchNorm, which uses Hubring's collectives, or"
                " torch.nn.BatchNorm"
            )


def check_fused(optimizer: Optimizer) -> None:
    """Checks that torch's fused kernel steps all parameters of an optimizer: pytorch#191763.

    Raises:
        ConfigError: It leaves those of half precision as they are.
    """
    groups = optimizer.param_groups if type(optimizer) is torch.optim.SGD else ()
    fused = (one for group in groups if group["fused"] for one in group["params"])
    for dtype in {one.dtype for one in fused if one.dtype.itemsize < 4 and one.device.type == "cpu"}:
        tried = torch.zeros(64, dtype=dtype, device="cpu")
        how: dict[str, Any] = {"lr": 1.0, **dict.fromkeys(("weight_decay", "momentum", "dampening"), 0.0)}
        how |= {"nesterov": False, "maximize": False, "is_first_step": True}
        fused_sgd([tried], [torch.ones_like(tried)], [], **how)
        if not bool(tried.all()):
            raise ConfigError(
                f"SGD(fused=True) of torch {torch.__version__} does not step parameters of {dtype} on the CPU"
                " (pytorch#191763): use fused=False, or let a hub step (without --aggregate)"
            )


# Parameters that no optimizer has.


class Untrained:
    """Sees that the loss reaches parameters of the model that no optimizer has.

    Those that were there at the start are a choice of the script: the same on all ranks, and said once. Later
    ones, as in `model.head = nn.Linear(...)`, each rank would have for itself.

    Args:
        model: The model, if it is known.
        communicator: Connects the ranks.
        exchanged: Returns the parameters of all optimizers.

    """

    def __init__(
        self, model: torch.nn.Module | None, communicator: Communicator, exchanged: Callable[[], Set[Tensor]]
    ) -> None:
        self._model = torch.nn.Module() if model is None else model
        self._alone = communicator.size == 1
        self._tells = communicator.rank == 0
        self._exchanged = exchanged
        self._first: set[Tensor] = set(self._model.parameters())
        self.looked = -1
        self.later: dict[str, Tensor] = {}

    def look(self) -> None:
        """Looks for such parameters. Call it before a step, if there are `later` ones or `looked` is old.

        Raises:
            ConfigError: A parameter that came after the start has a gradient, and there are other ranks.
        """
        if self.looked < 0 and self._tells:
            named = ((name, one) for name, one in self._model.named_parameters() if one in self._first)
            if used := _with_gradient(self._outside(named)):
                log.warning("the loss reaches %s, which no optimizer has: not trained", used)
        if self.looked != registrations:
            self.looked = registrations
            if not self._alone:
                check_averaging(self._model, self._exchanged())
            every = self._model.named_parameters()
            self.later = {name: one for name, one in every if one not in self._first}
        if not _with_gradient(self.later):
            return
        self.later = self._outside(self.later.items())
        used = _with_gradient(self.later)
        if not used:
            return
        text = (
            f"the model has got {used} since DistributedOptimizer was made, and no optimizer has them, so"
            " they would not be trained: change the model first, and then make the optimizers; or add them"
            " with optimizer.add_param_group(...); or set requires_grad=False"
        )
        if not self._alone:
            raise ConfigError(text)
        log.warning("%s", text)
        self.later.clear()

    def _outside(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Returns those that need a gradient and no optimizer has."""
        exchanged = self._exchanged()
        return {name: one for name, one in named if one.requires_grad and one not in exchanged}


def _with_gradient(parameters: Mapping[str, Tensor]) -> str:
    """Returns the first name of a parameter with a gradient, and how many others there are; else nothing."""
    used = sorted(name for name, one in parameters.items() if one.requires_grad and one.grad is not None)
    return "".join(used[:1]) + (f" and {len(used) - 1} more" if len(used) > 1 else "")

"""TorchState: elastic state with models, optimizers and samplers.

A registry holds the handlers that save and synchronize values of one type.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from hubring.workers.horovod.elastic import membership
from hubring.workers.horovod.elastic.run import ObjectState
from hubring.workers.horovod.elastic.sampler import ElasticSampler
from hubring.workers.horovod.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = [
    "ElasticSampler",
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


class StateHandler:
    """The interface: one value of an elastic state, and the saved copy of what it holds.

    A script can derive a class and add it with `set_handler_registry`.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Saves a copy of what the value holds."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restores the saved copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copies what the value holds from a rank that is not a newcomer to all ranks."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Replaces the value, and saves what it holds immediately."""
        self.value = value
        self.save()


class StateDictHandler(StateHandler):
    """A value with `state_dict` and `load_state_dict`, saved immediately."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))


class ModelStateHandler(StateDictHandler):
    """A module's parameters and buffers."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=membership.root())
        self.save()


class OptimizerStateHandler(StateDictHandler):
    """An optimizer, wrapped or not."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=membership.root())
        self.save()


class SamplerStateHandler(StateDictHandler):
    """An `ElasticSampler`."""

    def sync(self) -> None:
        self.value.load_state_dict(
            broadcast_object(self.value.state_dict(), membership.root(), "elastic.sampler")
        )
        self.save()


Registry = list[tuple[type, type[StateHandler]]]
"""Types and their handlers. The first type that a value is an instance of counts."""

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """Returns the registry of this process; changes of the list count for later states."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replaces the registry of this process, for states that are made later."""
    global _registry
    _registry = registry


class TorchState(ObjectState):
    """Elastic state for PyTorch; each argument becomes an attribute.

    Args:
        model: A module or None. Pass more modules under other names.
        optimizer: An optimizer or None. Pass more optimizers under other names.
        values: Values whose type has a handler (`get_handler_registry`): modules, optimizers and
            `ElasticSampler`s, unless a script adds others. Any other value is pickled.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        values.update(model=model, optimizer=optimizer)
        self._handlers: dict[str, StateHandler] = {}
        for name, value in list(values.items()):
            handler = next((make(value) for kind, make in _registry if isinstance(value, kind)), None)
            if handler is not None:
                self._handlers[name] = handler
                object.__setattr__(self, name, values.pop(name))
        super().__init__(**values)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Divides the samples again, even if `sync` is skipped."""
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute. A new model, optimizer or sampler under a known name is saved immediately."""
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers:
            handlers[name].set_value(value)
        object.__setattr__(self, name, value)

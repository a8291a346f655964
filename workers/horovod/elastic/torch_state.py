"""TorchState: elastic state with models, optimizers and samplers."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

import torch

from hubring.workers.horovod.collectives.objects import broadcast_object
from hubring.workers.horovod.elastic import membership
from hubring.workers.horovod.elastic.sampler import ElasticSampler
from hubring.workers.horovod.elastic.state import ObjectState
from hubring.workers.horovod.optimizer.parameters import broadcast_optimizer_state, broadcast_parameters


class StateHandler(ABC):
    """An object with a `state_dict`, and the saved copy of that state."""

    def __init__(self, value: Any) -> None:
        self.set_value(value)

    def set_value(self, value: Any) -> None:
        """Replaces the object, and saves its state immediately."""
        self.value = value
        self.save()

    def save(self) -> None:
        """Saves a copy of the state."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Restores the saved copy."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    @abstractmethod
    def sync(self) -> None:
        """Copies the state from `membership.root()`, and saves it."""


class ModelStateHandler(StateHandler):
    """A module's parameters and buffers."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=membership.root())
        self.save()


class OptimizerStateHandler(StateHandler):
    """An optimizer, wrapped or not."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=membership.root())
        self.save()


class SamplerStateHandler(StateHandler):
    """An `ElasticSampler`."""

    def sync(self) -> None:
        self.value.load_state_dict(
            broadcast_object(self.value.state_dict(), membership.root(), "elastic.sampler")
        )
        self.save()


_KINDS: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


class TorchState(ObjectState):
    """Elastic state for PyTorch; each argument becomes an attribute.

    Args:
        model: A module or None. Pass more modules under other names.
        optimizer: An optimizer or None. Pass more optimizers under other names.
        values: Modules, optimizers and `ElasticSampler`s; any other value is pickled.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        values.update(model=model, optimizer=optimizer)
        self._handlers: dict[str, StateHandler] = {}
        for name, value in list(values.items()):
            for kind, handler in _KINDS:
                if isinstance(value, kind):
                    self._handlers[name] = handler(values.pop(name))
                    object.__setattr__(self, name, value)
                    break
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

"""TorchState: models, optimizers and samplers among what training must not lose."""

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
    """Something with a `state_dict`, and the copy that was saved of it."""

    def __init__(self, value: Any) -> None:
        self.set_value(value)

    def set_value(self, value: Any) -> None:
        """Goes on with another value, which it saves at once."""
        self.value = value
        self.save()

    def save(self) -> None:
        """Keeps a copy of its state."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Puts the copy back."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    @abstractmethod
    def sync(self) -> None:
        """Gives it the state of the rank that has it."""


class ModelStateHandler(StateHandler):
    """A module: parameters and buffers."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=membership.root())
        self.save()


class OptimizerStateHandler(StateHandler):
    """An optimizer, wrapped or not."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=membership.root())
        self.save()


class SamplerStateHandler(StateHandler):
    """A sampler that knows how far its epoch is."""

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
    """Everything given to it is an attribute, saved and brought to all as befits it.

    Args:
        model: A module, if there is one; more may be given by other names.
        optimizer: Likewise.
        values: Modules, optimizers, `ElasticSampler`s; anything else is pickled.
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
        """Deals samples out anew, where nothing is brought from rank 0."""
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        """Another model or optimizer by the same name is saved at once."""
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers:
            handlers[name].set_value(value)
        object.__setattr__(self, name, value)

"""TorchState: elastic state with models, optimizers and samplers."""

from __future__ import annotations

from typing import Any

from hubring.workers.horovod.elastic.object_state import ObjectState
from hubring.workers.horovod.elastic.sampler import ElasticSampler
from hubring.workers.horovod.elastic.state_handlers import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    get_handler_registry,
    handler_of,
    set_handler_registry,
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
            handler = handler_of(value)
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

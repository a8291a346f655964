"""Elastic state, which survives changes of the workers, and `elastic.run`, which continues training with it.

A registry holds the handlers that save and synchronize values of one type in a `TorchState`.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from hubring.workers.horovod.elastic import membership
from hubring.workers.horovod.elastic.notification import notification_manager
from hubring.workers.horovod.elastic.sampler import ElasticSampler
from hubring.workers.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt, RefusedCall
from hubring.workers.horovod.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hubring.workers.horovod.world import current

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run", "run_fn"]
__all__ += ["ModelStateHandler", "OptimizerStateHandler", "SamplerStateHandler", "StateHandler"]
__all__ += ["get_handler_registry", "set_handler_registry"]

log = logging.getLogger(__name__)

Broadcast = Callable[[Any], Any]


def _from_root(value: Any) -> Any:
    return broadcast_object(value, membership.root(), "elastic.state")


class State:
    """The interface: saves state in this process, restores it, and synchronizes it between ranks.

    Args:
        bcast_object: Broadcasts an object; None, or `hvd.broadcast_object`: from a rank that is no newcomer.
        get_rank: Accepted as in Horovod; not used.
    """

    def __init__(
        self, bcast_object: Broadcast | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        self._broadcast = _from_root if bcast_object in (None, broadcast_object) else bcast_object
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._updates: SimpleQueue[int] = SimpleQueue()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Adds functions to call when the workers change, for example to scale the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """`elastic.run` calls this once the new ranks are known, before `sync`."""
        self._new_updates()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Makes the next `check_host_updates` raise HostsUpdatedInterrupt on all ranks, if called on rank 0.

        Args:
            timestamp: Accepted, but has no effect.
            update_res: A value of `HostUpdateResult`. If it is `removed`, no rank needs the state of another.
        """
        self._updates.put(update_res)

    def commit(self) -> None:
        """Saves the state, then checks for changes of the workers; raises as `check_host_updates`."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Checks for changes of the workers. Every rank must call this at the same point.

        Raises:
            HorovodInternalError: A worker is lost; `elastic.run` returns to the last commit.
            HostsUpdatedInterrupt: A worker joins, or `on_hosts_updated` was called; and no worker is lost.
        """
        membership.check(self._new_updates())

    def _new_updates(self) -> int:
        """Returns the bits of all updates that were not returned before."""
        update = 0
        while not self._updates.empty():
            update |= self._updates.get()
        return update

    def save(self) -> None:
        """Saves the state in this process's memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restores the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copies the state from a rank that is not a newcomer to all ranks."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapts the state to the new ranks; does nothing by default."""


class ObjectState(State):
    """State of any picklable values, which become attributes.

    Args:
        bcast_object: See `State`.
        get_rank: See `State`.
        values: The values by name.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(
        self, bcast_object: Broadcast | None = None, get_rank: Callable[[], int] | None = None, **values: Any
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved = values
        self._assign_saved()

    def save(self) -> None:
        self._saved = {name: getattr(self, name) for name in self._saved}

    def restore(self) -> None:
        self._assign_saved()

    def sync(self) -> None:
        if self._saved:
            self.save()
            self._saved = self._broadcast(self._saved)
            self._assign_saved()

    def _assign_saved(self) -> None:
        for name, value in self._saved.items():
            setattr(self, name, value)


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


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a training function whose first argument is a `State`.

    After every change of the workers the function is called again: with the last commit if a worker is lost,
    with the current state if a worker joins. Anything outside the state must not depend on the number of
    calls.

    Raises:
        HorovodInternalError: The job cannot continue: the server is lost, or the topology is a ring without
            `--min-workers`.
    """
    return run_fn(func, lambda: None)


def run_fn(func: Callable[..., Any], reset: Callable[[], Any]) -> Callable[..., Any]:
    """Wraps a training function as `run` does.

    Args:
        func: The training function.
        reset: Called after every change of the workers, before the state's `on_reset`. It can call
            `hvd.shutdown()` and `hvd.init()`, as in Horovod, but need not: the ranks change anyway.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        members = membership.of_process()
        members.enter()
        skip_sync = False
        notification_manager.register_listener(state)
        try:
            while True:
                try:
                    if not skip_sync:
                        state.sync()
                    result = func(state, *args, **kwargs)
                    members.leave()
                    return result
                except RefusedCall:
                    raise  # the next call would fail in the same way
                except HorovodInternalError as error:
                    log.warning("elastic: returning to the last commit: %s", error)
                    state.restore()
                    skip_sync = False
                except HostsUpdatedInterrupt as news:
                    skip_sync = news.skip_sync
                before = current().generation
                reset()
                if current().generation == before:  # otherwise init() has done it
                    members.adopt()
                state.on_reset()
        finally:
            notification_manager.remove_listener(state)

    return wrapper

"""The reducers of one communicator, in the order in which all ranks made them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

from hubring.workers.communicators.base import Communicator
from hubring.workers.reducer.reducer import Reducer


class Registry:
    """Finds the reducers of parameters. It keeps no reducer alive.

    Attributes:
        states: What moves an optimizer's state to and from a hub, by the `id` of the optimizer, whose hooks
            keep it alive (`hubring.workers.optimizer.hub_optimizer_state`).
    """

    def __init__(self) -> None:
        self.states: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._numbers = count()
        self._reducers: WeakValueDictionary[int, Reducer] = WeakValueDictionary()

    def add(self, reducer: Reducer) -> None:
        """Numbers a new reducer."""
        reducer.number = next(self._numbers)
        self._reducers[reducer.number] = reducer

    def of(self, parameters: Iterable[torch.Tensor]) -> list[Reducer]:
        """Returns the reducers that exchange some of these parameters' gradients, in order."""
        wanted = set(parameters)
        return [one for _, one in sorted(self._reducers.items()) if one.parameters & wanted]

    def unite(self, reducers: Iterable[Reducer]) -> None:
        """Exchanges these reducers, and what is exchanged with one of them, together from now on."""
        sets = list({id(one.together): one.together for one in reducers}.values())
        whole = next((one for one in sets if one.passes.is_open), sets[0])
        for other in sets:
            if other is not whole:
                whole.absorb(other)


def registry_of(communicator: Communicator) -> Registry:
    """Returns a communicator's registry."""
    if communicator.registry is None:
        communicator.registry = Registry()
    assert isinstance(communicator.registry, Registry)
    return communicator.registry

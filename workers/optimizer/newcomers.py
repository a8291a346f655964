"""Gives workers that enter a ring the state of its first member, between two steps.

The members and the newcomers call it for each optimizer, in the order in which the script makes them. Only
newcomers change anything: buffers, such as BatchNorm's statistics, are each member's own. As after a
restart, a newcomer's script sets the hyperparameters itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.messages import Call, Collective
from hubring.workers.collectives.broadcasts import as_bytes, fill
from hubring.workers.collectives.gatherings import allgather
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.ring.calls import RootLost
from hubring.workers.optimizer import checkpoint_file
from hubring.workers.optimizer.checkpoint_file import Saved, Trained, kind

T = TypeVar("T")


def give_states(communicator: Communicator, optimizers: Sequence[object]) -> None:
    """Gives newcomers the state of all optimizers, in order. Every member calls it."""
    all_trained = [one for one in optimizers if isinstance(one, Trained)]
    for left, trained in zip(reversed(range(len(all_trained))), all_trained, strict=True):
        _until_given(partial(_give, trained, left, communicator), communicator)


def enter(trained: Trained, communicator: Communicator) -> int:
    """Enters a running ring if this worker has not, and takes an optimizer's state.

    Args:
        trained: The optimizer. Its model and its state are overwritten.
        communicator: Connects members and newcomers.

    Returns:
        The completed steps.

    Raises:
        ConfigError: The members train another model. The error names the first difference.
    """
    if communicator.late:
        communicator.enter()
    step, communicator.awaits_state = _until_given(partial(_take, trained, communicator), communicator)
    return step


def _until_given(exchange: Callable[[], T], communicator: Communicator) -> T:
    """Exchanges again, with the next member as the first, if the first member is lost meanwhile."""
    while True:
        try:
            return exchange()
        except RootLost:
            communicator.between_steps(sys.maxsize)


def _give(trained: Trained, left: int, communicator: Communicator) -> None:
    """Gives one optimizer's model, state and completed steps; `left` optimizers follow."""
    gives = communicator.rank == 0
    state = trained.wrapped.state_dict()["state"] if gives else {}
    saved = Saved(trained.completed_steps, dict(trained.model_state) if gives else {}, state)
    description = json.dumps((left, _kinds(saved.tensors), checkpoint_file.described(saved).decode()))
    _announce(description.encode() if gives else b"", communicator)
    _broadcast(as_bytes(_tensors(saved)) if gives else None, communicator)


def _take(trained: Trained, communicator: Communicator) -> tuple[int, int]:
    """Returns the completed steps, and how many optimizers follow."""
    left, theirs, described = json.loads(_announce(b"", communicator))
    mine = trained.model_state
    own = _kinds(mine)
    for name in [*theirs, *own]:
        if own.get(name) != theirs.get(name):
            raise ConfigError(
                f"the ring trains another model: {name!r} is {theirs.get(name, 'nothing')} there and"
                f" {own.get(name, 'nothing')} in this worker; start all workers with the same script"
            )
    saved = checkpoint_file.prepared(described.encode())
    saved.tensors = {name: torch.empty(mine[name].shape, dtype=mine[name].dtype) for name in theirs}
    fill(_tensors(saved), _broadcast(None, communicator))
    with torch.no_grad():
        for name, tensor in saved.tensors.items():
            mine[name].copy_(tensor)
    checkpoint_file.restore_state(trained, saved)
    return saved.step, left


def _announce(description: bytes, communicator: Communicator) -> bytes:
    """Returns the first member's description. An allgather, because only that member knows its length."""
    own = torch.tensor(list(description), dtype=torch.uint8)
    gathered = allgather(own, "newcomers.state", communicator=communicator)
    if not gathered.numel():
        raise RootLost("the first member is lost, which describes its state")
    return bytes(gathered.tolist())


def _broadcast(whole: Tensor | None, communicator: Communicator) -> Tensor:
    given = [] if whole is None else [whole]
    result: Tensor = communicator.collective(Call(Collective.BROADCAST, "newcomers.tensors"), *given).get()
    return result


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: kind(tensor) for name, tensor in tensors.items()}


def _tensors(saved: Saved) -> list[Tensor]:
    """Returns all tensors in an order that members and newcomers share."""
    state = [
        value for values in saved.state.values() for value in values.values() if isinstance(value, Tensor)
    ]
    return [*saved.tensors.values(), *state]

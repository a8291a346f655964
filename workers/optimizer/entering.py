"""Gives ranks one model and state: at the start, and workers that enter a ring, between two steps.

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
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.collectives.agreement import share_from_rank_0
from hubring.workers.collectives.moving import allgather, as_bytes, fill
from hubring.workers.communicators.base import ChangingMembers, Communicator
from hubring.workers.communicators.ring.healing.calls import RootLost
from hubring.workers.optimizer.checkpoints import Checkpoints
from hubring.workers.optimizer.own_state import OwnStates
from hubring.workers.optimizer.parameters import TrainedParameters
from hubring.workers.optimizer.rank_checks import check_same_state
from hubring.workers.optimizer.saved_state import (
    Saved,
    Trained,
    describe_state,
    prepare_state,
    restore_state,
    tensor_kind,
)

T = TypeVar("T")


def start(
    optimizer: Trained,
    trained: TrainedParameters,
    buckets: list[Bucket],
    checkpoints: Checkpoints | None,
    states: OwnStates | None,
) -> int:
    """Gives all ranks the same model and state.

    Args:
        optimizer: The optimizer.
        trained: Its parameters.
        buckets: Those to attach.
        checkpoints: Where this worker saves and resumes, if it does.
        states: The worker's part of a hub's checkpoints, if the hub steps.

    Returns:
        The completed steps to continue from.

    Raises:
        ConfigError: The ranks' models or states differ.
    """
    communicator = trained.communicator
    if (members := communicator.members) is not None and members.awaits_state:
        trained.attach(buckets)
        return enter(optimizer, communicator, members)
    if checkpoints is not None:
        checkpoints.load(optimizer)
    # A late worker, which is refused in attach(), must not wait for the others before that.
    if communicator.steps_on == "worker" and not (trained.inherited or communicator.late):
        check_same_state(optimizer.wrapped, communicator)
    attach, rest = partial(trained.attach, buckets), trained.rest()
    share = partial(share_from_rank_0, rest, communicator, "model.rest", trained.timeout)
    if states is not None:
        return states.start(trained, attach, share)
    step = attach()
    if not communicator.late:
        trained.name_odd()
        share()
    return step if checkpoints is None else max(step, checkpoints.share(optimizer))


def give_states(communicator: Communicator, optimizers: Sequence[object]) -> None:
    """Gives newcomers the state of all optimizers, in order. Every member calls it."""
    members = communicator.members
    assert members is not None
    all_trained = [one for one in optimizers if isinstance(one, Trained)]
    for left, trained in zip(reversed(range(len(all_trained))), all_trained, strict=True):
        _until_given(partial(_give, trained, left, communicator), members)


def enter(trained: Trained, communicator: Communicator, members: ChangingMembers) -> int:
    """Enters a running ring if this worker has not, and takes an optimizer's state.

    Args:
        trained: The optimizer. Its model and its state are overwritten.
        communicator: Connects members and newcomers.
        members: Lets this worker in.

    Returns:
        The completed steps.

    Raises:
        ConfigError: The members train another model. The error names the first difference.
    """
    if communicator.late:
        members.enter()
    step, members.awaits_state = _until_given(partial(_take, trained, communicator), members)
    return step


def _until_given(exchange: Callable[[], T], members: ChangingMembers) -> T:
    """Repeats the exchange with the next member as the root if the root is lost meanwhile."""
    while True:
        try:
            return exchange()
        except RootLost:
            members.between_steps(sys.maxsize)


def _give(trained: Trained, left: int, communicator: Communicator) -> None:
    """Gives one optimizer's model, state and completed steps; `left` optimizers follow."""
    gives = communicator.rank == 0
    state = trained.wrapped.state_dict()["state"] if gives else {}
    saved = Saved(trained.completed_steps, dict(trained.model_state) if gives else {}, state)
    description = json.dumps((left, _kinds(saved.tensors), describe_state(saved).decode()))
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
    saved = prepare_state(described.encode())
    saved.tensors = {
        name: torch.empty(mine[name].shape, dtype=mine[name].dtype, device="cpu") for name in theirs
    }
    fill(_tensors(saved), _broadcast(None, communicator))
    with torch.no_grad():
        for name, tensor in saved.tensors.items():
            mine[name].copy_(tensor)
    restore_state(trained, saved)
    return saved.step, left


def _announce(description: bytes, communicator: Communicator) -> bytes:
    """Returns the first member's description. An allgather, because only that member knows its length."""
    own = torch.tensor(list(description), dtype=torch.uint8, device="cpu")
    gathered = allgather(own, "newcomers.state", communicator=communicator)
    if not gathered.numel():
        raise RootLost("rank 0 was lost while sending its optimizer state")
    return bytes(gathered.tolist())


def _broadcast(whole: Tensor | None, communicator: Communicator) -> Tensor:
    given = [] if whole is None else [whole]
    result: Tensor = communicator.collective(Call(Collective.BROADCAST, "newcomers.tensors"), *given).get()
    return result


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: tensor_kind(tensor) for name, tensor in tensors.items()}


def _tensors(saved: Saved) -> list[Tensor]:
    """Returns all tensors in an order that members and newcomers share."""
    state = [one for each in saved.state.values() for one in each.values() if isinstance(one, Tensor)]
    return [*saved.tensors.values(), *state]

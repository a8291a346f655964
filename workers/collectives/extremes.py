"""The least and the largest of all ranks' numbers, which tell whether the ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hubring.ps.core.messages import ReduceOp
from hubring.workers.collectives.reductions import allreduce, allreduce_async
from hubring.workers.communicators.base import CollectiveWork, Communicator


def extremes(numbers: Sequence[int], name: str, communicator: Communicator) -> tuple[list[int], list[int]]:
    """Returns the least and the largest of each number over all ranks, in one collective.

    Args:
        numbers: As many on every rank, of at most 63 bits.
        name: Name of the collective.
        communicator: Connects the ranks, which all call it.
    """
    most = allreduce(_both(numbers), ReduceOp.MAX, name, communicator=communicator)
    return _apart(most)


def start_extremes(
    numbers: Sequence[int],
    name: str,
    communicator: Communicator,
    then: Callable[[list[int], list[int]], None],
) -> None:
    """As `extremes`, without waiting: calls `then`, in any thread, once all ranks have called it."""

    def done(work: CollectiveWork) -> None:
        if work.error is None:
            then(*_apart(work.result))

    work = allreduce_async(_both(numbers), ReduceOp.MAX, name, communicator=communicator)
    work.when_done(lambda _: done(work))


def _both(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor([*numbers, *(-number for number in numbers)])


def _apart(most: torch.Tensor) -> tuple[list[int], list[int]]:
    largest, negated = most.view(2, -1).tolist()
    return [-number for number in negated], largest

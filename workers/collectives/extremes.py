"""The least and the largest of all ranks' numbers, which tell whether the ranks agree."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hubring.ps.core.messages import ReduceOp
from hubring.workers.collectives.reductions import allreduce
from hubring.workers.communicators.base import Communicator


def extremes(numbers: Sequence[int], name: str, communicator: Communicator) -> tuple[list[int], list[int]]:
    """Returns the least and the largest of each number over all ranks, in one collective.

    Args:
        numbers: As many on every rank, of at most 63 bits.
        name: Name of the collective.
        communicator: Connects the ranks, which all call it.
    """
    own = torch.tensor([*numbers, *(-number for number in numbers)])
    most: list[int] = allreduce(own, ReduceOp.MAX, name, communicator=communicator).tolist()
    return [-number for number in most[len(numbers) :]], most[: len(numbers)]

"""What a server of peer `rpc` holds; a remote call names a function, not an object."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.futures import Future

from hubring.ps.core.types import Hyper
from hubring.ps.optim.server_optimizer import Assign, SliceOptimizer, SliceStep


class Round:
    """Adds up what ranks give; the last one's call answers all."""

    def __init__(self, values: Tensor, optimizer: str, size: int) -> None:
        self._values = values
        self._optimizer: SliceStep = SliceOptimizer(optimizer) if optimizer else Assign()
        self._size = size
        self._lock = threading.Lock()
        self._given = 0
        self._sum = torch.empty(0)
        self._answer: Future[Tensor] = Future()

    def push(self, gradients: Tensor, hyper: Hyper) -> Future[Tensor]:
        """Takes a rank's gradients, which are the server's to keep; the answer is the same for all ranks."""
        with self._lock:
            answer = self._answer
            self._given += 1
            self._sum = gradients if self._given == 1 else self._sum.add_(gradients)
            if self._given < self._size:
                return answer
            self._given, self._answer = 0, Future()
            self._optimizer.step(self._values, [self._sum], self._size, hyper, self._sum)
        answer.set_result(self._values)
        return answer


class Gathering:
    """Collects a value from every rank; the last one's call answers all."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._given: dict[int, Any] = {}
        self._answer: Future[list[Any]] = Future()

    def give(self, rank: int, value: Any) -> Future[list[Any]]:
        """Takes a rank's value; the answer is every rank's, in rank order."""
        with self._lock:
            answer, self._given[rank] = self._answer, value
            if len(self._given) < self._size:
                return answer
            given, self._given, self._answer = self._given, {}, Future()
        answer.set_result([given[each] for each in range(self._size)])
        return answer


_ROUNDS: dict[int, Round] = {}
_GATHERINGS: dict[int, Gathering] = {}
_MEETING = threading.Lock()


def hold(number: int, values: Tensor, optimizer: str, size: int) -> None:
    """Takes a slice's first values, and the name of what steps it; empty: it is only averaged."""
    _ROUNDS[number] = Round(values.clone(), optimizer, size)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def push_pull(number: int, gradients: Tensor, hyper: Hyper) -> Future[Tensor]:
    """Takes a rank's gradients of a slice; the answer is its values after the step, or the mean."""
    return _ROUNDS[number].push(gradients, hyper)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def gather(size: int, rank: int, value: Any) -> Future[list[Any]]:
    """Takes a rank's value; the answer is every rank's."""
    with _MEETING:
        gathering = _GATHERINGS.setdefault(size, Gathering(size))
    return gathering.give(rank, value)

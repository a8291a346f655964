"""The logic of a peer's parameter server: it waits for all ranks, then answers all of them.

This module does no I/O: a library's own server passes in the values, and sends the answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hubring.ps.core.types import Hyper
from hubring.ps.optim.mean_and_step import Assign, SliceOptimizer, SliceStep

Answer = Callable[[Any], object]
"""Called once with a rank's answer."""


class Gathering:
    """Collects one value from every rank. The last rank's call answers all ranks; then a new round starts."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._given: dict[int, Any] = {}
        self._answers: list[Answer] = []

    def give(self, rank: int, value: Any, answer: Answer) -> None:
        """Adds a rank's value; the answer is the same for all ranks."""
        with self._lock:
            self._take(rank, value)
            self._answers.append(answer)
            if len(self._answers) < self._size:
                return
            outcome, answers, self._answers = self._outcome(), self._answers, []
        for each in answers:
            each(outcome)

    def _take(self, rank: int, value: Any) -> None:
        self._given[rank] = value

    def _outcome(self) -> Any:
        given, self._given = self._given, {}
        return [given[rank] for rank in range(self._size)]


class Round(Gathering):
    """Sums a slice's gradients, given as `(gradients, hyper)`, and steps it; answers with the slice's values.

    Args:
        size: Number of ranks.
        values: The initial values; copied.
        optimizer: Name of the optimizer; empty: the answer is the mean.
        keeps: Whether the round owns the gradients and writes to them; otherwise it only reads them.
    """

    def __init__(self, size: int, values: Tensor, optimizer: str, *, keeps: bool) -> None:
        super().__init__(size)
        self._values = values.clone()
        self._optimizer: SliceStep = SliceOptimizer(optimizer) if optimizer else Assign()
        self._keeps = keeps
        self._sum = torch.empty_like(values)
        self._hyper: Hyper = {}

    def _take(self, rank: int, value: tuple[Tensor, Hyper]) -> None:
        gradients, self._hyper = value
        if self._answers:
            self._sum.add_(gradients)
        elif self._keeps:
            self._sum = gradients
        else:
            self._sum.copy_(gradients)

    def _outcome(self) -> Tensor:
        self._optimizer.step(self._values, [self._sum], self._size, self._hyper, self._sum)
        return self._values

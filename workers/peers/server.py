"""What a peer's parameter server does: it waits for all ranks, then answers all of them.

Here is no I/O: a library's own server gives what came, and sends what the answers are called with.
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
"""Gets a rank's answer, once."""


class Gathering:
    """Collects a value from every rank; the last one's call answers all, and the next round begins."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._given: dict[int, Any] = {}
        self._answers: list[Answer] = []

    def give(self, rank: int, value: Any, answer: Answer) -> None:
        """Takes a rank's value; the answer is the same for all ranks."""
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
    """Adds up a slice's gradients, given as `(gradients, hyper)`, and steps it; the answer is its values.

    Args:
        size: How many ranks there are.
        values: The first ones; copied.
        optimizer: Name of what steps them; empty: the answer is the mean.
        keeps: Gradients are this round's to keep, and to write to; otherwise they are only read.
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

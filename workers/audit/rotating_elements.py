"""Records other elements in some steps, so that all of a model has its turn.

The elements of each step are the same in all steps, because torch's optimizer repeats a step only with the
state of all steps before. In one step of `PERIOD`, other elements are recorded with the optimizer's state,
from which that step can be repeated alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate, compress
from math import gcd
from typing import Any

from torch import Tensor

from hubring.workers.audit.elements import AFTER, BEFORE, StepElements
from hubring.workers.audit.sample import TappedParameter, TensorSample

PERIOD = 16
"""Other elements are recorded in one of so many steps."""

MOST = 4096
"""About so many, of all parameters together."""

AT_ONCE = 1 << 23
"""Elements of the parameters that have their turn in one step, as a hub must send their state."""

LEAST = 4
"""Fewest of a parameter that has as many."""


GOLDEN = (5**0.5 - 1) / 2


def is_due(step: int) -> bool:
    """Whether other elements of this step are recorded."""
    return step % PERIOD == 0


def _chosen(name: str, numel: int, whole: int, turn: int) -> TensorSample:
    """Returns the elements of one parameter of a model of `whole` elements.

    Each turn begins between the places of those before, as far from them as the golden ratio gets.
    """
    stride = -(-numel // max(LEAST, MOST * numel // whole))
    while gcd(stride, numel) > 1:  # else all could be of one column
        stride += 1
    first = (zlib.crc32(name.encode()) + round(turn * GOLDEN * stride)) % stride
    return TensorSample(first, stride, len(range(first, numel, stride)))


class OtherElements(StepElements):
    """The other elements of one step.

    Args:
        step: The step, which decides the choice; all ranks and rows choose alike.
        parameters: All parameters, each of which this rank holds whole.
    """

    def __init__(self, step: int, parameters: Sequence[TappedParameter]) -> None:
        sizes = [one.values.numel() for one in parameters]
        parts = [begin // AT_ONCE for begin in accumulate(sizes[:-1], initial=0)]
        every, turn = list(dict.fromkeys(parts)), step // PERIOD
        due = [part == every[turn % len(every)] for part in parts]
        whole = sum(compress(sizes, due))
        chosen = []
        for one, has_turn in zip(parameters, due, strict=True):
            sample = TensorSample(0, 1, 0)
            if has_turn:
                sample = _chosen(one.name, one.values.numel(), whole, turn // len(every))
            chosen.append(one._replace(sample=sample, held=sample, places=slice(0, sample.number)))
        super().__init__(chosen)
        self.begin()
        self.states: dict[str, bytes] = {}
        """The optimizer's state before the step."""

    @property
    def due(self) -> dict[str, Tensor]:
        """The parameters that have their turn, by name."""
        return {one.name: one.values for one in self.parameters if one.sample.number}

    def take_state(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes torch's state by parameter name."""
        self.states = self.state(states)

    def moved(self) -> bool:
        """Whether parameters are not as they were after the step."""
        self.take_parameters(BEFORE)
        return self.content(BEFORE) != self.content(AFTER)

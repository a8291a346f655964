"""Finds elements that keep their value though they have a gradient, in all of a model.

The recorded sample is fixed, so a fault in a few other elements, as in rows of an embedding, does not show in
it. Here, one step of `PERIOD` looks at a part of each large parameter, so that all of it had its turn after
`PERIOD * STRIDE` steps. An element that kept its value is looked at until it moves, or was found `ENOUGH`
times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hubring.ps.optim.hyperparameters import as_number
from hubring.workers.audit.sample import TappedParameter, local

PERIOD = 8
"""One of so many steps is looked at."""

STRIDE = 6
"""One of so many elements is looked at."""

ENOUGH = 4
"""After so many times an element keeps its value not by chance, as where a momentum is just zero."""

CLEAR = 16.0
"""By how many units in the last place a gradient must move an element."""

MOST = 64
"""Most suspects of a parameter, as a script can keep many elements as they are, for example with a mask."""

AT_ONCE, ELEMENTS = 32, 1 << 20
"""Most parameters that are looked at in one step, and most elements of each. Others wait."""


class StillElements:
    """Looks at the parameters of one optimizer."""

    def __init__(self) -> None:
        self._turn = 0
        self._kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        """By parameter: elements, their values, and whether a step must change them."""
        self._chosen: dict[int, tuple[TappedParameter, Tensor, Tensor]] = {}
        """By parameter: what `look` chose, elements and their values."""
        self._seen: list[tuple[int, Tensor, Tensor, Tensor]] = []
        self._times: dict[int, dict[int, int]] = {}

    def look(self, parameters: Sequence[TappedParameter]) -> None:
        """Looks at values before a step changes them.

        Args:
            parameters: All parameters, always in the same order.
        """
        for number, (elements, before, due) in self._kept.items():
            now = local(parameters[number].values).detach().reshape(-1)[elements]
            self._seen.append((number, elements, due, now == before))
        self._kept, self._chosen = {}, {}
        self._turn += 1
        if self._turn % PERIOD or not parameters:
            return
        turns = -(-len(parameters) // AT_ONCE)
        turn = self._turn // PERIOD
        for number in range(turn % turns, len(parameters), turns):
            one = parameters[number]
            if one.held.number == one.values.numel():
                continue
            values = local(one.values).detach().reshape(-1)
            stride = max(-(-STRIDE // turns), -(-len(values) // ELEMENTS))
            # A rank can hold no element of a divided parameter.
            begin = min(turn // turns % stride, len(values))
            elements = torch.arange(begin, len(values), stride, device=values.device)
            suspects = [each for each, times in self._times.get(number, {}).items() if times < ENOUGH]
            elements = torch.cat([elements.new_tensor(suspects), elements])
            self._chosen[number] = one, elements, values[elements]

    def judge(self, groups: Sequence[dict[str, Any]], divisor: float) -> None:
        """Finds which of these elements the step must change, as it begins.

        Args:
            groups: The groups of the optimizer, with their learning rates.
            divisor: By which the step divides gradients.
        """
        chosen, self._chosen = self._chosen, {}
        if not chosen:
            return
        rates = {id(one): as_number(each.get("lr")) or 0.0 for each in groups for one in each["params"]}
        for number, (one, elements, before) in chosen.items():
            gradient, limit = one.values.grad, CLEAR * torch.finfo(before.dtype).eps
            if gradient is None or gradient.layout is not torch.strided:
                continue
            slopes = local(gradient).detach().reshape(-1)[elements].abs().clamp(max=1)
            moves = rates.get(id(one.values), 0.0) / divisor * slopes
            self._kept[number] = elements, before, moves > limit * before.abs()

    def take(self) -> list[tuple[int, int]]:
        """Returns the elements that were found often enough by now: parameter and place."""
        found, seen = list[tuple[int, int]](), self._seen
        self._seen = []
        for number, elements, due, same in seen:
            times = self._times.setdefault(number, {})
            for element in elements[due & ~same].tolist() if times else ():
                times.pop(element, None)
            for element in dict.fromkeys(elements[due & same][:MOST].tolist()):
                if element in times or len(times) < MOST:
                    times[element] = times.get(element, 0) + 1
                    found += [(number, element)] if times[element] == ENOUGH else []
        return found

    def forget(self) -> None:
        """The last step was skipped."""
        self._kept = {}

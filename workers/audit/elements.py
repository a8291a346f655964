"""What one step does to some elements of each parameter: one row of them for each moment of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hubring.workers.audit.audit_file import AuditStep
from hubring.workers.audit.sample import TappedParameter, is_distributed, local

OWN, ARRIVED, GIVEN, BEFORE, AFTER = range(5)


class StepElements:
    """The elements of the parameters that a step has recorded so far.

    Attributes:
        parameters: The parameters. Later ones come behind those that are there.
        owns: One byte per parameter: 1 if backward made a gradient of it.
        gives: The same of gradients that `step()` got.
    """

    def __init__(self, parameters: Sequence[TappedParameter] = ()) -> None:
        self.parameters: list[TappedParameter] = []
        self.owns, self.gives = bytearray(), bytearray()
        self._taken = torch.zeros(5, 0, dtype=torch.float32, device="cpu")
        self.extend(parameters)

    @property
    def wide(self) -> bool:
        """Whether elements are recorded as float64, else float32."""
        return self._taken.dtype == torch.float64

    def extend(self, parameters: Sequence[TappedParameter]) -> None:
        """Adds parameters. What the current step has recorded stays."""
        self.parameters += parameters
        counts = [one.sample.number for one in self.parameters]
        wide = any(one.values.dtype == torch.float64 for one in self.parameters)
        device = self.parameters[0].values.device if self.parameters else torch.device("cpu")
        dtype = torch.float64 if wide else torch.float32
        taken = torch.zeros(5, sum(counts), dtype=dtype, device=device)
        taken[:, : self._taken.shape[1]] = self._taken
        self.owns.extend(bytes(len(counts) - len(self.owns)))
        self._taken = taken
        self._views = [list(row.split(counts)) for row in taken]
        self._held_views = [
            [view[one.places] for view, one in zip(views, self.parameters, strict=True)]
            for views in self._views
        ]

    def begin(self) -> None:
        """Begins a step."""
        self.owns, self.gives = bytearray(len(self.parameters)), bytearray(len(self.parameters))

    def gradient_made(self, position: int, gradient: Tensor) -> None:
        """Takes what backward adds to a gradient, and what there is before."""
        tapped, own = self.parameters[position], self._views[OWN][position]
        earlier = tapped.values.grad
        if is_distributed(earlier):  # a part of a mean: own gradients of earlier passes are recorded
            earlier = own.clone() if self.owns[position] else None
        elif earlier is not None:
            earlier = tapped.sample.of(earlier)
        own.copy_(tapped.sample.of(gradient))
        if earlier is not None:
            own.add_(earlier)
        self.owns[position] = 1

    def take_gradients(self, row: int) -> None:
        """Copies all gradients, zeros for those that are None."""
        there = bytearray(len(self.parameters))
        places, parts = list[Tensor](), list[Tensor]()
        for position, tapped in enumerate(self.parameters):
            gradient = tapped.values.grad
            if gradient is not None:
                there[position] = 1
                places.append(self._held_views[row][position])
                parts.append(tapped.held.of(local(gradient)))
        if len(parts) < len(self.parameters):
            self._taken[row].zero_()
        if parts:
            torch._foreach_copy_(places, parts)
        if row == OWN:
            self.owns = there
        elif row == GIVEN:
            self.gives = there

    def take_parameters(self, row: int) -> None:
        """Copies all parameters."""
        parts = [each.held.of(local(each.values)) for each in self.parameters]
        torch._foreach_copy_(self._held_views[row], parts)

    def content(self, row: int) -> bytes:
        """Returns the bytes of a row."""
        return self._taken[row].cpu().numpy().tobytes()

    def step(self, known: frozenset[int], last_after: bytes, **more: Any) -> AuditStep:
        """Returns the step.

        Args:
            known: The rows that were taken.
            last_after: The parameters after the last step; empty: not known.
            more: Other fields of the step.
        """
        rows = self._taken.cpu()
        own, arrived, given, before, after = (row.numpy().tobytes() for row in rows)
        same = ARRIVED in known and given == arrived
        return AuditStep(
            own=own,
            owns=bytes(self.owns),
            arrived=arrived if ARRIVED in known else b"",
            given=given if GIVEN in known and not same else b"",
            gives=bytes(self.gives) if GIVEN in known else b"",
            before=before if BEFORE in known and before != last_after else b"",
            after=after if AFTER in known else b"",
            **more,
        )

    def state(self, states: Mapping[str, Mapping[str, Any]]) -> dict[str, bytes]:
        """Returns these elements of the optimizer's state, by its name; NaN where there is none.

        Args:
            states: torch's state by parameter name. A tensor of one number is repeated for each element.
        """
        names = dict.fromkeys(name for state in states.values() for name in state)
        found = {name: torch.full_like(self._taken[0], torch.nan, device="cpu") for name in names}
        ends = list(accumulate((one.sample.number for one in self.parameters), initial=0))
        for one, begin, end in zip(self.parameters, ends, ends[1:], strict=False):
            for name, value in states.get(one.name, {}).items():
                if isinstance(value, Tensor) and value.numel() in (1, one.values.numel()):
                    part = one.sample.of(value) if value.dim() else value.detach()
                    found[name][begin:end] = part.cpu()
        return {name: each.numpy().tobytes() for name, each in found.items()}

"""Counts backward passes, and tells when a parcel's gradients have had all of theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hubring.workers.horovod.optimizer.gradient_group import Parcel


class Passes:
    """Watches the parameters of some parcels.

    Args:
        parcels: Each parameter is in one of them.
        per_step: How many backward passes a step sums up.
        on_ready: Called, during backward, with a parcel whose parameters have had them all.

    Attributes:
        begun: A backward pass has come since the last `reset`.
    """

    def __init__(self, parcels: Sequence[Parcel], per_step: int, on_ready: Callable[[Parcel], None]) -> None:
        self.begun = False
        self._parcels = parcels
        self._per_step = per_step
        self._on_ready = on_ready
        self._of = {parameter: parcel for parcel in parcels for parameter in parcel.parameters}
        self._left: dict[torch.Tensor, int] = {}
        self.reset()
        for parameter in self._of:
            parameter.register_post_accumulate_grad_hook(self._came)

    def set_per_step(self, per_step: int) -> None:
        """Changes how many passes a step sums up, from a new step on."""
        self._per_step = per_step
        self.reset()

    def reset(self) -> None:
        """Begins a step."""
        self.begun = False
        self._left = dict.fromkeys(self._of, self._per_step)
        for parcel in self._parcels:
            parcel.reset()

    def _came(self, parameter: torch.Tensor) -> None:
        if self._left[parameter] <= 0:
            raise AssertionError(
                f"Gradients were computed more than backward_passes_per_step times ({self._per_step}) before"
                " call to step(). Increase backward_passes_per_step to accumulate gradients locally."
            )
        self.begun = True
        self._left[parameter] -= 1
        if self._left[parameter] == 0:
            parcel = self._of[parameter]
            parcel.missing.discard(parameter)
            if not parcel.missing:
                self._on_ready(parcel)

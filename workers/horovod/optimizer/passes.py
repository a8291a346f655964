"""Counts backward passes, and detects when a bucket's gradients are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hubring.workers.horovod.optimizer.gradient_group import Bucket


class Passes:
    """Counts the backward passes of the parameters of all buckets.

    Args:
        buckets: Each parameter is in one bucket.
        per_step: Number of backward passes per step.
        on_ready: Called during backward with each bucket whose gradients are complete.

    Attributes:
        begun: Whether a backward pass ran since the last `reset`.
    """

    def __init__(self, buckets: Sequence[Bucket], per_step: int, on_ready: Callable[[Bucket], None]) -> None:
        self.begun = False
        self._buckets = buckets
        self._per_step = per_step
        self._on_ready = on_ready
        self._of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        self._left: dict[torch.Tensor, int] = {}
        self.reset()
        for parameter in self._of:
            parameter.register_post_accumulate_grad_hook(self._came)

    def set_per_step(self, per_step: int) -> None:
        """Sets the number of backward passes per step, and starts a new step."""
        self._per_step = per_step
        self.reset()

    @property
    def left(self) -> dict[torch.Tensor, int]:
        """The number of backward passes that each parameter still waits for in this step."""
        return self._left

    def came(self) -> list[torch.Tensor]:
        """Returns the parameters with a backward pass in this step."""
        return [parameter for parameter, left in self._left.items() if left < self._per_step]

    def reset(self) -> None:
        """Starts a step."""
        self.begun = False
        self._left = dict.fromkeys(self._of, self._per_step)
        for bucket in self._buckets:
            bucket.reset()

    def _came(self, parameter: torch.Tensor) -> None:
        if self._left[parameter] <= 0:
            raise AssertionError(
                f"Gradients were computed more than backward_passes_per_step times ({self._per_step}) before"
                " call to step(). Increase backward_passes_per_step to accumulate gradients locally."
            )
        self.begun = True
        self._left[parameter] -= 1
        if self._left[parameter] == 0:
            bucket = self._of[parameter]
            bucket.missing.discard(parameter)
            if not bucket.missing:
                self._on_ready(bucket)

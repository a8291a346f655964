"""A slice's optimizer, applied block by block.

torch's kernels need the sum of the gradients first. The sum of one block is still in the cache for the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hubring.ps.core.types import Hyper
from hubring.ps.optim.mean_and_step import SliceStep, optimizer_for
from hubring.ps.optim.zeros import zeros_like

BLOCK_BYTES = 2 << 20
"""Measured for 100 MiB from 2 workers, in ms, with two processes, 1 MiB of L2 cache each and 32 MiB of
shared L3, with torch's kernels. Blocks of 0.5, 1, 2, 4 and 8 MiB take 16.5, 15.9, 16.1, 16.6 and 19.8 with
SGD and momentum, and 22.2, 21.1, 20.7, 22.5 and 24.1 with Adam. On a GPU a slice is one block, because a
kernel launch costs more than memory there."""


class BlockSteps:
    """Steps the values of one slice.

    Args:
        name: The optimizer; empty if the values become the mean itself.
        values: Flat; updated in place.
        finite: Whether an optimizer refuses gradients that are not finite.

    Raises:
        ConfigError: The hub does not support this optimizer.
    """

    def __init__(self, name: str, values: Tensor, *, finite: bool = True) -> None:
        whole = max(values.numel(), 1)
        length = BLOCK_BYTES // values.element_size() if values.device.type == "cpu" else whole
        self._parts: list[tuple[slice, Tensor, SliceStep]] = []
        for start in range(0, whole, length):
            part = slice(start, start + length)
            optimizer = optimizer_for(name, values.dtype, values.device, finite=finite)
            self._parts.append((part, values[part], optimizer))

    def check(self, hyper: Hyper) -> None:
        """Checks the hyperparameters of a step.

        Raises:
            ConfigError: `step` cannot use them.
        """
        self._parts[0][-1].check(hyper)

    def step(self, gradients: Sequence[Tensor], hyper: Hyper, scratch: Tensor) -> None:
        """Updates the values with the mean of `gradients`, summed in this order, as the ring does.

        Args:
            gradients: Flat, with the values' length and dtype; only read.
            hyper: Hyperparameters of this step.
            scratch: At least as long as a block, with the same dtype.

        Raises:
            NonFinite: The sum has a NaN or an infinity. The affected elements are unchanged, but other
                elements may have stepped, so the values are at no single step.
        """
        for part, values, optimizer in self._parts:
            # A single block is not sliced: for small tensors slicing costs as much as the sum.
            parts = gradients if len(self._parts) == 1 else [gradient[part] for gradient in gradients]
            optimizer.step(values, parts, len(gradients), hyper, scratch)

    def state(self) -> dict[str, Tensor]:
        """Returns a copy of the optimizer's tensors by name: flat, or scalars that all blocks share."""
        states = [optimizer.state() for *_, optimizer in self._parts]
        return {name: _joined([state[name] for state in states]) for name in states[0]}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restores a state from `state()`."""
        for part, values, optimizer in self._parts:
            own = {name: _copied(_part(tensor, part).to(values.device)) for name, tensor in state.items()}
            optimizer.load(own)


def _copied(tensor: Tensor) -> Tensor:
    return zeros_like(tensor).copy_(tensor)


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if tensors[0].dim() else tensors[0].clone()


def _part(tensor: Tensor, part: slice) -> Tensor:
    return tensor[part] if tensor.dim() else tensor

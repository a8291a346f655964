"""A slice's optimizer, block by block.

Where torch's kernels step, the gradients are summed first: of a block, the sum is still in the cache then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hubring.ps.core.types import Hyper
from hubring.ps.optim.mean_and_step import SliceStep, optimizer_for
from hubring.ps.optim.zeros import zeros_like

BLOCK_BYTES = 2 << 20
"""Measured for 100 MiB from 2 workers, in ms, by two processes with 1 MiB of L2 cache each and 32 MiB of
L3 together: SGD with momentum 16.5 with blocks of 0.5 MiB, 15.9 of 1, 16.1 of 2, 16.6 of 4, 19.8 of 8;
Adam 22.2, 21.1, 20.7, 22.5, 24.1, by torch's kernels. A GPU takes a slice as one block: a
kernel's start costs it more than its memory does."""


class BlockSteps:
    """Steps the values of one slice.

    Args:
        name: The optimizer, or empty where the values are to be the mean itself.
        values: Flat; the steps happen in their memory.
        finite: Whether to refuse gradients that are not, where an optimizer steps with them.

    Raises:
        ConfigError: The hub does not run this optimizer.
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
        """Refuses what `step` could not use.

        Raises:
            ConfigError: Says what, and the mend.
        """
        self._parts[0][-1].check(hyper)

    def step(self, gradients: Sequence[Tensor], hyper: Hyper, scratch: Tensor) -> None:
        """Updates the values by the mean of `gradients`, summed in the order given, as the ring does.

        Args:
            gradients: Flat, of the values' length and dtype; only read.
            hyper: For this step.
            scratch: At least as long as a block, and of the same dtype.

        Raises:
            NonFinite: The sum is NaN or infinite somewhere, and has not come into the values. Others of them
                may have stepped, so they are of no step any more.
        """
        for part, values, optimizer in self._parts:
            # Of a single block nothing is cut: where it is small, cutting would cost as much as adding.
            parts = gradients if len(self._parts) == 1 else [gradient[part] for gradient in gradients]
            optimizer.step(values, parts, len(gradients), hyper, scratch)

    def state(self) -> dict[str, Tensor]:
        """A copy of the optimizer's tensors by name: flat, or of one element where blocks share it."""
        states = [optimizer.state() for *_, optimizer in self._parts]
        return {name: _joined([state[name] for state in states]) for name in states[0]}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Goes on from such a state."""
        for part, values, optimizer in self._parts:
            own = {name: _copied(_part(tensor, part).to(values.device)) for name, tensor in state.items()}
            optimizer.load(own)


def _copied(tensor: Tensor) -> Tensor:
    return zeros_like(tensor).copy_(tensor)


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if tensors[0].dim() else tensors[0].clone()


def _part(tensor: Tensor, part: slice) -> Tensor:
    return tensor[part] if tensor.dim() else tensor

"""A slice's optimizer, applied block by block.

torch's kernels need the sum of the gradients first. The sum of one block is still in the cache for the step.

Law: until a parameter is left out of a step, or a state with different parameters is loaded, the blocks
ignore parameters, and all count the same steps. From then on each parameter has blocks and a state of its
own, so that a parameter that is left out keeps its values, its state and its number of steps. A block begins
where its parameter begins in the slice, so the arithmetic is that of torch's fused kernel on that tensor. It
is bitwise equal if the whole parameter is in the slice, or is cut at multiples of 64 bytes from its start.
Otherwise the elements of at most one vector at the end of a part can differ by a unit in the last place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hubring.ps.core.optimizer_state import STEP, OptimizerState
from hubring.ps.core.types import Hyper
from hubring.ps.optim.hyperparameters import STATE
from hubring.ps.optim.mean_and_step import SliceStep, optimizer_for
from hubring.ps.optim.zeros import zeros_like

BLOCK_BYTES = 2 << 20
"""Measured for 100 MiB from 2 workers, in ms, with two processes, 1 MiB of L2 cache each and 32 MiB of
shared L3, with torch's kernels. Blocks of 0.5, 1, 2, 4 and 8 MiB take 16.5, 15.9, 16.1, 16.6 and 19.8 with
SGD and momentum, and 22.2, 21.1, 20.7, 22.5 and 24.1 with Adam. On a GPU a slice is one block, because a
kernel launch costs more than memory there."""


class _Block(NamedTuple):
    """Elements of the slice that are stepped together. `parameter` counts once parameters are separate."""

    part: slice
    values: Tensor
    optimizer: SliceStep
    parameter: int = 0


class BlockSteps:
    """Steps the values of one slice.

    Args:
        name: The optimizer; empty if the values become the mean itself.
        values: Flat; updated in place.
        finite: Whether an optimizer refuses gradients that are not finite.
        parameters: The elements of each parameter in the slice, in order and without gaps; None if there is
            one parameter.

    Raises:
        ConfigError: The hub does not support this optimizer.
    """

    def __init__(
        self, name: str, values: Tensor, *, finite: bool = True, parameters: Sequence[slice] | None = None
    ) -> None:
        self._name = name
        self._values = values
        self._make = partial(optimizer_for, name, values.dtype, values.device, finite=finite)
        self._parameters = parameters or [slice(0, values.numel())]
        self._separate = len(self._parameters) == 1
        self._checked: Hyper | None = None
        self._blocks = list(self._cut(0, slice(0, max(values.numel(), 1))))

    def check(self, hyper: Hyper) -> None:
        """Checks the hyperparameters of a step.

        Raises:
            ConfigError: `step` cannot use them.
        """
        if hyper != self._checked:
            for block in self._blocks:
                block.optimizer.check(hyper)
            self._checked = hyper

    def step(
        self,
        gradients: Sequence[Tensor],
        hyper: Hyper,
        scratch: Tensor,
        absent: Collection[int] = (),
        count: int | None = None,
    ) -> None:
        """Updates the values with the mean of `gradients`, summed in this order, as the ring does.

        Args:
            gradients: Flat, with the values' length and dtype; only read.
            hyper: Hyperparameters of this step.
            scratch: At least as long as a block, with the same dtype.
            absent: Parameters, by index, whose values and state stay as they are.
            count: The number of gradients, if `gradients` is their sum alone.

        Raises:
            NonFinite: The sum has a NaN or an infinity. The affected elements are unchanged, but other
                elements may have stepped, so the values are at no single step.
        """
        for part, values, optimizer, _ in self._present(absent) if absent else self._blocks:
            # A single block is not sliced: for small tensors slicing costs as much as the sum.
            parts = gradients if len(self._blocks) == 1 else [gradient[part] for gradient in gradients]
            if count is not None and count > 1:  # a kernel may overwrite the sum
                parts = [scratch[: values.numel()].copy_(parts[0])]
            optimizer.step(values, parts, count or len(gradients), hyper, scratch)

    def state(self) -> OptimizerState:
        """Returns a copy of the optimizer's state."""
        states = [block.optimizer.state() for block in self._blocks]
        names = {name: tensor for state in states for name, tensor in state.items()}
        tensors = {
            name: self._steps(states) if name == STEP else self._joined(name, states) for name in names
        }
        fresh = {block.parameter for block, state in zip(self._blocks, states, strict=True) if not state}
        separate = self._separate and len(self._parameters) > 1
        return OptimizerState(tensors, tuple(sorted(fresh)) if tensors else (), separate)

    def misfit(self, state: OptimizerState) -> str:
        """Returns why the optimizer cannot continue from a state, as a clause; empty if it can."""
        needed = STATE.get(self._name, ())
        missing = [name for name in needed if name not in state.tensors] if state.tensors else []
        return f"it lacks {', '.join(missing)}; {self._name} needs {', '.join(needed)}" if missing else ""

    def load(self, state: OptimizerState) -> None:
        """Replaces the optimizer's state with a copy of one from `state()`; without tensors it is fresh."""
        self._checked = None  # whether an option can be used depends on the state
        steps = state.tensors.get(STEP)
        if state.separate or state.fresh or (steps is not None and bool((steps != steps[:1]).any())):
            self._separate_parameters()
        fresh = state.fresh if state.tensors else range(len(self._parameters))
        for part, values, optimizer, parameter in self._blocks:
            own = {} if parameter in fresh else state.tensors
            optimizer.load(
                {
                    name: _copied((tensor[parameter] if name == STEP else tensor[part]).to(values.device))
                    for name, tensor in own.items()
                }
            )

    def _present(self, absent: Collection[int]) -> list[_Block]:
        self._separate_parameters()
        return [block for block in self._blocks if block.parameter not in absent]

    def _separate_parameters(self) -> None:
        """Gives each parameter blocks of its own."""
        if self._separate:
            return
        state = self.state()
        self._separate = True
        self._blocks = [
            block for index, part in enumerate(self._parameters) for block in self._cut(index, part)
        ]
        self.load(state)

    def _cut(self, parameter: int, whole: slice) -> Iterator[_Block]:
        on_cpu = self._values.device.type == "cpu"
        length = BLOCK_BYTES // self._values.element_size() if on_cpu else whole.stop - whole.start
        for start in range(whole.start, whole.stop, length):
            part = slice(start, min(start + length, whole.stop))
            yield _Block(part, self._values[part], self._make(), parameter)

    def _steps(self, states: Sequence[dict[str, Tensor]]) -> Tensor:
        """Returns the number of steps of each parameter."""
        steps = torch.zeros(len(self._parameters), dtype=torch.float32)
        for block, state in zip(self._blocks, states, strict=True):
            if STEP in state:
                steps[block.parameter if self._separate else slice(None)] = state[STEP].item()
        return steps

    def _joined(self, name: str, states: Sequence[dict[str, Tensor]]) -> Tensor:
        """Returns a tensor of the whole slice, with zeros where a block has none."""
        pairs = zip(self._blocks, states, strict=True)
        return torch.cat([state.get(name, torch.zeros_like(block.values)) for block, state in pairs])


def _copied(tensor: Tensor) -> Tensor:
    return zeros_like(tensor).copy_(tensor)

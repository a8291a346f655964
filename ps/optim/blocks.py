"""A slice's optimizer, applied block by block.

Values of half precision are a copy, rounded to nearest even, of a float32 master, which is what is stepped.

torch's kernels need the sum of the gradients first. The sum of one block is still in the cache for the step.

Law: the blocks ignore parameters that have been stepped alike so far. Where the hyperparameters of neighbors
differ, or a loaded state does, blocks are cut for good. Once a parameter is left out of a step, each has
blocks and a state of its own, so that it keeps its values, its state and its number of steps. Such a block
begins where its parameter begins in the slice, so the arithmetic is that of torch's fused kernel on that
tensor. It is bitwise equal if the whole parameter is in the slice, or is cut at multiples of 64 bytes from
its start. Otherwise the elements of at most one vector at the end of a parameter can differ by a unit in the
last place.

Blocks that are too small for a compiled loop share calls with their neighbors: one sum, and one call of
torch's kernel for all that have the same hyperparameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.optimizer_state import MASTER, STEP, OptimizerState, state_dtype
from hubring.ps.core.types import HyperTable, StepHyper
from hubring.ps.optim.block_optimizers import FusedStep, SliceStep, optimizer_for, step_together
from hubring.ps.optim.hyperparameters import OPTIONAL_STATE, STATE, kwargs_of
from hubring.ps.optim.sums import WORTH, finite_sum, summed, zeros_like

BLOCK_BYTES = 2 << 20
"""Measured for 100 MiB from 2 workers, in ms, with two processes, 1 MiB of L2 cache each and 32 MiB of
shared L3, with torch's kernels. Blocks of 0.5, 1, 2, 4 and 8 MiB take 16.5, 15.9, 16.1, 16.6 and 19.8 with
SGD and momentum, and 22.2, 21.1, 20.7, 22.5 and 24.1 with Adam. On a GPU a slice is one block, because a
kernel launch costs more than memory there."""


class _Block(NamedTuple):
    """Elements of the slice with one state. They are of these parameters, which are stepped alike."""

    part: slice
    values: Tensor
    rounded: Tensor | None
    """The values as workers get them, if those are their master."""
    optimizer: SliceStep
    parameters: range


class _Neighbors:
    """Blocks without gaps that are summed in one pass."""

    def __init__(self, blocks: list[_Block]) -> None:
        self.blocks = blocks
        self.part = slice(blocks[0].part.start, blocks[-1].part.stop)
        self.steps = [block.optimizer for block in blocks if isinstance(block.optimizer, FusedStep)]
        self.values = [block.values for block in blocks]
        self._scratch: Tensor | None = None

    def sums(self, scratch: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Returns the end of `scratch` as memory for the sum, and each block's part of it.

        The front may hold the mean of compressed gradients.
        """
        if scratch is not self._scratch:
            self._scratch, self._sum = scratch, scratch[self.part.start - self.part.stop :]
            self._sums = list(torch.split(self._sum, [values.numel() for values in self.values]))
        return self._sum, self._sums


class BlockSteps:
    """Steps the values of one slice.

    Args:
        name: The optimizer; empty if the values become the mean itself.
        values: Flat; updated in place.
        finite: Whether an optimizer refuses gradients that are not finite.
        parameters: The elements of each parameter in the slice, in order and without gaps; None if there is
            one parameter.

    Attributes:
        dtype: In which gradients are summed, and stepped with.
        stepped: What the optimizer steps: the values, or their master.

    Raises:
        ConfigError: The hub does not support this optimizer.
    """

    def __init__(
        self, name: str, values: Tensor, *, finite: bool = True, parameters: Sequence[slice] | None = None
    ) -> None:
        self._name = name
        self._values = self.stepped = values
        self.dtype = state_dtype(values.dtype)
        self._has_master = bool(name) and self.dtype is not values.dtype
        if self._has_master:
            self.stepped = zeros_like(values, self.dtype).copy_(values)
        self._make = partial(optimizer_for, name, values.device, finite=finite)
        self._sum = finite_sum if finite else summed
        on_cpu = values.device.type == "cpu"
        self._most = BLOCK_BYTES // self.stepped.element_size() if on_cpu else max(values.numel(), 1)
        self._cuts: tuple[int, ...] = ()
        self._cut_for: tuple[int, ...] = ()
        self._blocks: list[_Block] = []
        self._parameters = parameters or [slice(0, values.numel())]
        self.checked: StepHyper | None = None
        """The last hyperparameters that `check` accepted; None if it must check them again."""
        self._table: HyperTable | None = None
        self._options: list[dict[str, Any]] = []
        """torch's options of each row of `_table`."""
        self._divisors: dict[int, Tensor | None] = {1: None}
        self._together: list[_Neighbors] | None = None
        self._without: Collection[int] = ()
        """What was absent from `_together`."""
        self._cut_before([0])

    def check(self, hyper: StepHyper) -> None:
        """Checks the hyperparameters of a step.

        Raises:
            ConfigError: `step` cannot use them.
        """
        if isinstance(hyper, HyperTable):
            self._check_table(hyper)
        else:
            for block in self._blocks:
                block.optimizer.check(hyper)
        self.checked = hyper

    def _check_table(self, table: HyperTable) -> None:
        if not self._name or len(table.row_of) != len(self._parameters):
            raise ConfigError(
                f"got hyperparameters of {len(table.row_of)} parameters, for a slice of"
                f" {len(self._parameters)} that {self._name or 'no optimizer'} steps; start all workers with"
                " the same model and --bucket-bytes"
            )
        self._options = [kwargs_of(row, self._name) for row in table.rows]
        self._table = table
        for block in self._blocks if self._name in OPTIONAL_STATE else ():
            for row in {table.row_of[parameter] for parameter in block.parameters}:
                assert isinstance(block.optimizer, FusedStep), "a table is for an optimizer"
                block.optimizer.check_state(table.rows[row])

    def step(
        self,
        gradients: Sequence[Tensor],
        hyper: StepHyper,
        scratch: Tensor,
        absent: Collection[int] = (),
        count: int | None = None,
    ) -> None:
        """Updates the values with the mean of `gradients`, summed in this order, as the ring does.

        Args:
            gradients: Flat, with the values' length and their dtype, or `dtype`; only read. Each can be the
                sum of several.
            hyper: Hyperparameters of this step.
            scratch: At least as long as a block, of `dtype`.
            absent: Parameters, by index, whose values and state stay as they are.
            count: The number of gradients, if some of `gradients` are sums.

        Raises:
            NonFinite: The sum has a NaN or an infinity. The affected elements are unchanged, but other
                elements may have stepped, so the values are at no single step.
        """
        count = count or len(gradients)
        if isinstance(hyper, HyperTable) or absent or len(self._cuts) > 1:
            self._step_apart(gradients, hyper, scratch, absent, count)
            return
        for part, values, rounded, optimizer, _ in self._blocks:
            # A single block is not sliced: for small tensors slicing costs as much as the sum.
            parts = gradients if len(self._blocks) == 1 else [gradient[part] for gradient in gradients]
            if len(parts) == 1 and count > 1:  # a kernel may overwrite the sum
                parts = [scratch[: values.numel()].copy_(parts[0])]
            optimizer.step(values, parts, count, hyper, scratch, rounded)

    def _step_apart(
        self,
        gradients: Sequence[Tensor],
        hyper: StepHyper,
        scratch: Tensor,
        absent: Collection[int],
        count: int,
    ) -> None:
        """Steps parameters that are absent, or that differ or did differ in their hyperparameters."""
        table = hyper if isinstance(hyper, HyperTable) else HyperTable((hyper,), (0,) * len(self._parameters))
        if absent:
            self._cut_before(range(len(self._parameters)))
        elif table.row_of != self._cut_for:
            pairs = enumerate(pairwise(table.row_of), 1)
            self._cut_before(at for at, (row, next_row) in pairs if row != next_row)
            self._cut_for = table.row_of
        if table != self._table:
            self._table, self._options = table, [kwargs_of(row, self._name) for row in table.rows]
        if count not in self._divisors:
            self._divisors[count] = torch.tensor(float(count), device=self._values.device)
        if self._together is None or absent != self._without:
            present = (block for block in self._blocks if block.parameters[0] not in absent)
            self._together, self._without = _neighbors(present, self._most), absent
        for some in self._together:
            parts = [gradient[some.part] for gradient in gradients]
            rows = [table.row_of[block.parameters[0]] for block in some.blocks]
            if len(rows) == 1:
                (values,) = some.values
                if len(parts) == 1 and count > 1:  # a kernel may overwrite the sum
                    parts = [scratch[: values.numel()].copy_(parts[0])]
                (block,) = some.blocks
                block.optimizer.step(values, parts, count, table.rows[rows[0]], scratch, block.rounded)
                continue
            whole, sums = some.sums(scratch)
            total = self._sum(parts, whole)
            if len(parts) == 1:
                whole.copy_(total)
            options = [self._options[row] for row in rows]
            step_together(some.values, sums, some.steps, options, self._divisors[count])
            if self._has_master:
                self._values[some.part].copy_(self.stepped[some.part])

    def write(self, values: Tensor) -> None:
        """Replaces the values; where they are what they were, their master stays."""
        self._values.copy_(values)
        if self._has_master:
            self._load_master(self.stepped)

    def _load_master(self, master: Tensor) -> None:
        """Takes a master over where the values are its rounded ones, elsewhere the values themselves."""
        held, rounded = (one.view(torch.int16) for one in (self._values, master.to(self._values.dtype)))
        self.stepped.copy_(torch.where(held == rounded, master, self._values))

    def state(self) -> OptimizerState:
        """Returns a copy of the optimizer's state."""
        states = [block.optimizer.state() for block in self._blocks]
        names = {name: tensor for state in states for name, tensor in state.items()}
        tensors = {
            name: self._steps(states) if name == STEP else self._joined(name, states) for name in names
        }
        pairs = zip(self._blocks, states, strict=True)
        fresh = {parameter for block, state in pairs if not state for parameter in block.parameters}
        if self._has_master and not torch.equal(self.stepped, self._values.to(self.stepped.dtype)):
            tensors[MASTER] = self.stepped.clone()
            # Where there is nothing else, as with plain SGD, a master alone is a state.
            alike = self.stepped == self._values
            fresh = {at for at in fresh if bool(alike[self._parameters[at]].all())}
        cuts = self._cuts if len(self._cuts) > 1 else ()
        return OptimizerState(tensors, tuple(sorted(fresh)) if tensors else (), cuts)

    def misfit(self, state: OptimizerState) -> str:
        """Returns why the optimizer cannot continue from a state, as a clause; empty if it can."""
        needed = STATE.get(self._name, ())
        missing = [name for name in needed if name not in state.tensors] if state.tensors else []
        return f"it lacks {', '.join(missing)}; {self._name} needs {', '.join(needed)}" if missing else ""

    def load(self, state: OptimizerState) -> None:
        """Replaces the optimizer's state with a copy of one from `state()`; without tensors it is fresh."""
        self.checked = None  # whether an option can be used depends on the state
        if self._has_master:
            self._load_master(state.tensors.get(MASTER, self._values).to(self.stepped))
        count = len(self._parameters)
        tensors = {name: tensor for name, tensor in state.tensors.items() if name != MASTER}
        fresh = frozenset(state.fresh if tensors else range(count))
        steps = tensors[STEP].tolist() if STEP in tensors else [0.0] * count
        kinds = [(at in fresh, steps[at]) for at in range(count)]
        self._cut_before([0, *state.cuts, *(at for at in range(1, count) if kinds[at] != kinds[at - 1])])
        for part, values, _, optimizer, parameters in self._blocks:
            first = parameters[0]
            kept = {
                name: tensor[first] if name == STEP else tensor[part].to(values.dtype)
                for name, tensor in tensors.items()
                if first not in fresh
            }
            optimizer.load({name: _copied(tensor.to(values.device)) for name, tensor in kept.items()})

    def _cut_before(self, parameters: Iterable[int]) -> None:
        """Gives these parameters blocks that begin with them, beside those that have some."""
        cuts = tuple(sorted({*self._cuts, *parameters}))
        if cuts == self._cuts:
            return
        state = self.state() if self._blocks else OptimizerState()
        self._cuts = cuts
        ends = [*cuts[1:], len(self._parameters)]
        self._blocks = [block for pair in zip(cuts, ends, strict=True) for block in self._cut(range(*pair))]
        self.checked = self._together = None
        if state.tensors:
            self.load(state)

    def _cut(self, parameters: range) -> Iterator[_Block]:
        first, last = self._parameters[parameters[0]], self._parameters[parameters[-1]]
        for start in range(first.start, max(last.stop, 1), self._most):
            part = slice(start, min(start + self._most, max(last.stop, 1)))
            rounded = self._values[part] if self._has_master else None
            yield _Block(part, self.stepped[part], rounded, self._make(), parameters)

    def _steps(self, states: Sequence[dict[str, Tensor]]) -> Tensor:
        """Returns the number of steps of each parameter."""
        steps = torch.zeros(len(self._parameters), dtype=torch.float32, device="cpu")
        for block, state in zip(self._blocks, states, strict=True):
            if STEP in state:
                steps[block.parameters.start : block.parameters.stop] = state[STEP].item()
        return steps

    def _joined(self, name: str, states: Sequence[dict[str, Tensor]]) -> Tensor:
        """Returns a tensor of the whole slice, with zeros where a block has none."""
        pairs = zip(self._blocks, states, strict=True)
        return torch.cat([state.get(name, torch.zeros_like(block.values)) for block, state in pairs])


def _copied(tensor: Tensor) -> Tensor:
    return zeros_like(tensor).copy_(tensor)


def _neighbors(blocks: Iterable[_Block], most: int) -> list[_Neighbors]:
    """Puts small blocks that follow each other together, up to `most` elements; others stay alone."""
    runs: list[list[_Block]] = []
    for block in blocks:
        run = runs[-1] if runs else []
        follows = run and run[-1].part.stop == block.part.start and _is_small(run[-1]) and _is_small(block)
        if follows and block.part.stop - run[0].part.start <= most:
            run.append(block)
        else:
            runs.append([block])
    return [_Neighbors(run) for run in runs]


def _is_small(block: _Block) -> bool:
    return isinstance(block.optimizer, FusedStep) and (block.values.is_cuda or block.values.numel() < WORTH)

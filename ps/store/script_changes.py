"""What scripts changed on one key since its last step, until the next step.

Law: in lockstep modes the ranks of a round must agree, bit by bit, on the parameters and the optimizer's
state before its step. A rank that wrote no parameters has the hub's, unless it has not taken the step
after which the others wrote (it is `excused`). A rank's later write replaces its earlier one. A retry of
either changes nothing. What belongs to a closed round is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from hubring.ps.core.messages import Write, WriteParameters, WriteState
from hubring.ps.core.optimizer_state import OptimizerState
from hubring.ps.core.types import Sender


class Disagreement(Exception):
    """Two ranks changed a key differently before one step.

    Attributes:
        ranks: The two ranks.
        tensor: The state's tensor that differs; empty for parameters and if only one rank wrote a state.
        index: The first element that differs; None if only one of the ranks wrote a state, or if the states
            have different tensors.
    """

    def __init__(self, ranks: tuple[int, int], tensor: str = "", index: int | None = None) -> None:
        super().__init__(ranks, tensor, index)
        self.ranks = ranks
        self.tensor = tensor
        self.index = index


class PendingWrites:
    """The last parameters and the last state that each rank wrote.

    Attributes:
        waiting: Whether a write waits for its round.
    """

    def __init__(self) -> None:
        self.waiting = False
        self._values: dict[int, Tensor] = {}
        self._states: dict[int, OptimizerState] = {}
        self._newest: dict[tuple[type[Write], int], tuple[int, int]] = {}
        """Incarnation and sequence of each rank's newest write."""

    def is_newest(self, write: Write) -> bool:
        """Records a write. Returns False if its sender has sent it, or a newer one of this kind, before."""
        place = type(write), write.sender.rank
        number = write.sender.incarnation, write.sequence
        if place in self._newest and number <= self._newest[place]:
            return False
        self._newest[place] = number
        return True

    def put(self, write: Write) -> None:
        """Keeps a copy of a write until its round closes."""
        self.waiting = True
        rank = write.sender.rank
        if isinstance(write, WriteParameters):
            self._values[rank] = write.values.clone()
        else:
            tensors = {name: tensor.clone() for name, tensor in write.state.tensors.items()}
            self._states[rank] = OptimizerState(tensors, write.state.fresh)

    def writes(self, key: int, version: int) -> list[Write]:
        """Returns the writes that wait for the round of this version of the key."""
        found: list[Write] = []
        for rank, values in self._values.items():
            incarnation, sequence = self._newest[WriteParameters, rank]
            found.append(WriteParameters(Sender(rank, incarnation), key, version, sequence, values))
        for rank, state in self._states.items():
            incarnation, sequence = self._newest[WriteState, rank]
            found.append(WriteState(Sender(rank, incarnation), key, version, sequence, state))
        return found

    def state_of(self, rank: int) -> OptimizerState | None:
        """Returns the state that a rank wrote, if it waits for its round."""
        return self._states.get(rank)

    def agreed(
        self, ranks: Sequence[int], held: Tensor, excused: Collection[int] = ()
    ) -> tuple[Tensor | None, OptimizerState | None]:
        """Returns the parameters and the state to apply before a step; None for what no rank wrote.

        Args:
            ranks: The contributors of the round, in ascending order.
            held: The hub's parameters.
            excused: Contributors that agree with whatever the others wrote, unless they wrote too.

        Raises:
            Disagreement: The ranks wrote different parameters or states.
        """
        values = self._agreed_values(_heard(ranks, self._values, excused), held)
        return values, self._agreed_state(_heard(ranks, self._states, excused))

    def _agreed_values(self, ranks: Sequence[int], held: Tensor) -> Tensor | None:
        if not any(rank in self._values for rank in ranks):
            return None
        here = held.cpu()
        first, *others = [self._values.get(rank, here) for rank in ranks]
        for rank, values in zip(ranks[1:], others, strict=True):
            if (index := _difference(first, values)) is not None:
                raise Disagreement((ranks[0], rank), index=index)
        return first

    def _agreed_state(self, ranks: Sequence[int]) -> OptimizerState | None:
        first = self._states.get(ranks[0]) if ranks else None
        for rank in ranks[1:]:
            state = self._states.get(rank)
            if state is None and first is None:
                continue
            if state is None or first is None or state.fresh != first.fresh:
                raise Disagreement((ranks[0], rank))
            if state.tensors.keys() != first.tensors.keys():
                raise Disagreement((ranks[0], rank))
            for name, tensor in state.tensors.items():
                if (index := _difference(first.tensors[name], tensor)) is not None:
                    raise Disagreement((ranks[0], rank), name, index)
        return first

    def forget(self, rank: int) -> None:
        """Drops the writes of a rank that left."""
        self._values.pop(rank, None)
        self._states.pop(rank, None)
        self.waiting = bool(self._values or self._states)

    def clear(self) -> None:
        """Drops all writes, because their round has closed."""
        self._values.clear()
        self._states.clear()
        self.waiting = False


def _heard(ranks: Sequence[int], wrote: Collection[int], excused: Collection[int]) -> Sequence[int]:
    """Returns the ranks that must agree."""
    return [rank for rank in ranks if rank in wrote or rank not in excused]


def _difference(one: Tensor, other: Tensor) -> int | None:
    """Returns the first element whose bits differ, or None."""
    size = one.element_size()
    ours, theirs = (tensor.view(torch.uint8).view(-1, size) for tensor in (one, other))
    if torch.equal(ours, theirs):
        return None
    return int((ours != theirs).any(dim=1).nonzero()[0])

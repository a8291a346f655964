"""Collectives on a ring whose members have agreed on what they are about to do.

torch.distributed carries them where it has the operation and the dtype. Where
it does not, or not exactly (Gloo forgets NaN in a minimum), and where the
tensors are so small that only the number of messages counts, all parts are
gathered and every member reduces them by the hub's own rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hubring.ps.core.messages import Call, Collective, ReduceOp
from hubring.ps.core.types import Layout
from hubring.ps.store.collective import dealt_rows, rows_for
from hubring.ps.store.collective_reduction import WIDER, averaged, reduced
from hubring.workers.communicators.ring_process_group import Ring

REDUCTIONS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVERAGE: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}
"""The average is a sum, divided afterwards: Gloo has none."""

_WIDER = {**WIDER, torch.bool: torch.int32, torch.int16: torch.int32}
"""What is reduced in place of a dtype that Gloo cannot, or would round at every addition."""

SMALL = 4096
"""Bytes of tensors that are gathered and reduced in rank order, as on the hub."""


class Doing(NamedTuple):
    """One operation, as this member does it."""

    ring: Ring
    calls: Sequence[Call]
    """Of all members, in rank order; they fit each other."""
    tensors: Sequence[Tensor]
    """This member's."""
    root: int
    """Its place among the members."""

    @property
    def call(self) -> Call:
        """This member's."""
        return self.calls[self.ring.rank]

    @property
    def what(self) -> str:
        return f"{self.call.collective.name.lower()} {self.call.name!r}"

    @property
    def at_root(self) -> bool:
        return self.ring.rank == self.root


def perform(doing: Doing) -> Sequence[Tensor]:
    """Carries an operation out and waits for it; returns new tensors: what it gives this member.

    Raises:
        RingBroken: Some member is gone.
    """
    match doing.call.collective:
        case Collective.ALLREDUCE:
            return _reduced(doing)
        case Collective.REDUCE:
            return _reduced(doing, at=doing.root)
        case Collective.REDUCE_SCATTER:
            return [_own_rows(doing.ring, tensor) for tensor in _reduced(doing)]
        case Collective.ALLGATHER:
            return _joined(_gathered(doing))
        case Collective.GATHER:
            return _gathered_at_root(doing)
        case Collective.BROADCAST:
            return _broadcast(doing)
        case Collective.SCATTER:
            return _scattered(doing)
        case Collective.ALLTOALL:
            return _exchanged(doing)
        case _:  # that all have come is all there is to it
            return []


def broadcast_into(ring: Ring, tensor: Tensor, root: int, what: str) -> None:
    """Overwrites a tensor with the root's, and waits."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    if tensor.numel():
        ring.run(what, lambda group: group.broadcast([tensor], options))


def _reduced(doing: Doing, at: int | None = None) -> list[Tensor]:
    """The reduction, on all members or `at` one alone."""
    op, nbytes = doing.call.op, sum(tensor.nbytes for tensor in doing.tensors)
    fickle = op in (ReduceOp.MIN, ReduceOp.MAX) and any(one.is_floating_point() for one in doing.tensors)
    if op is ReduceOp.ADASUM or fickle or nbytes <= SMALL:
        # All gather, also where one member alone wants it: they are small, or rare.
        totals = [reduced(parts, op) for parts in zip(*_gathered(doing), strict=True)]
    else:
        totals = _summed(doing, at)
    return totals if at is None or at == doing.ring.rank else []


def _summed(doing: Doing, at: int | None) -> list[Tensor]:
    """As torch.distributed reduces: all tensors of one dtype together."""
    totals: dict[int, Tensor] = {}
    wide = [_WIDER.get(tensor.dtype, tensor.dtype) for tensor in doing.tensors]
    for dtype in dict.fromkeys(wide):
        places = [place for place, its in enumerate(wide) if its is dtype]
        flat = torch.cat([doing.tensors[place].reshape(-1).to(dtype) for place in places])
        _reduce_into(doing, flat, at)
        averaged(flat, doing.ring.size, doing.call.op)
        for place, piece in zip(
            places, torch.split(flat, [doing.tensors[one].numel() for one in places]), strict=True
        ):
            own = doing.tensors[place]
            totals[place] = piece.to(own.dtype).view(own.shape)
    return [totals[place] for place in range(len(wide))]


def _reduce_into(doing: Doing, flat: Tensor, at: int | None) -> None:
    options: Any = dist.AllreduceOptions() if at is None else dist.ReduceOptions()
    options.reduceOp = REDUCTIONS[doing.call.op]
    if not flat.numel():
        return
    if at is None:
        doing.ring.run(doing.what, lambda group: group.allreduce([flat], options))
    else:
        options.rootRank = at
        doing.ring.run(doing.what, lambda group: group.reduce([flat], options))


def _own_rows(ring: Ring, tensor: Tensor) -> Tensor:
    # Gloo's own reduce_scatter is an allreduce as well, and knows only rows that divide.
    return dealt_rows(tensor, ring.size)[ring.rank].clone()


def _gathered(doing: Doing) -> list[list[Tensor]]:
    """Every member's tensors."""
    lengths = [_nbytes(call.layouts) for call in doing.calls]
    pieces = doing.ring.gather(doing.what, _bundle(doing.tensors), lengths)
    return [_unbundle(piece, call.layouts) for piece, call in zip(pieces, doing.calls, strict=True)]


def _joined(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [
        torch.cat([tensor.reshape(tensor.shape or (1,)) for tensor in tensors])
        for tensors in zip(*parts, strict=True)
    ]


def _gathered_at_root(doing: Doing) -> list[Tensor]:
    lengths = [_nbytes(call.layouts) for call in doing.calls]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: lengths[doing.ring.rank]] = _bundle(doing.tensors)
    pieces = [torch.empty_like(padded) for _ in lengths] if doing.at_root else []
    options: Any = dist.GatherOptions()
    options.rootRank = doing.root
    if padded.numel():
        doing.ring.run(doing.what, lambda group: group.gather([pieces] if pieces else [], [padded], options))
    return [
        tensor
        for piece, call in zip(pieces, doing.calls, strict=False)
        for tensor in _unbundle(piece, call.layouts)
    ]


def _broadcast(doing: Doing) -> list[Tensor]:
    layouts = doing.calls[doing.root].layouts
    memory = _bundle(doing.tensors) if doing.at_root else torch.empty(_nbytes(layouts), dtype=torch.uint8)
    broadcast_into(doing.ring, memory, doing.root, doing.what)
    return _unbundle(memory, layouts)


def _scattered(doing: Doing) -> list[Tensor]:
    layouts = doing.calls[doing.root].layouts
    mine = torch.empty(max(layout.nbytes for layout in layouts), dtype=torch.uint8)
    pieces = [torch.zeros_like(mine) for _ in layouts] if doing.at_root else []
    for piece, tensor in zip(pieces, doing.tensors, strict=False):
        piece[: tensor.nbytes] = _bundle([tensor])
    options: Any = dist.ScatterOptions()
    options.rootRank = doing.root
    if mine.numel():
        doing.ring.run(doing.what, lambda group: group.scatter([mine], [pieces] if pieces else [], options))
    return _unbundle(mine, [layouts[doing.ring.rank]])


def _exchanged(doing: Doing) -> list[Tensor]:
    splits = [rows_for(call, doing.ring.size) for call in doing.calls]
    received = [counts[doing.ring.rank] for counts in splits]
    layout = doing.call.layouts[0]
    width = prod(layout.shape[1:]) * getattr(torch, layout.dtype).itemsize
    memory = torch.empty(sum(received) * width, dtype=torch.uint8)
    given = [width * count for count in splits[doing.ring.rank]]
    taken = [width * count for count in received]
    if width and any(map(sum, splits)):
        own = _bundle(doing.tensors)
        doing.ring.run(doing.what, lambda group: group.alltoall_base(memory, own, taken, given))
    rows = Layout(layout.dtype, (sum(received), *layout.shape[1:]))
    return [*_unbundle(memory, [rows]), torch.tensor(received)]


# Tensors as bytes, one after another.


def _nbytes(layouts: Sequence[Layout]) -> int:
    return sum(layout.nbytes for layout in layouts)


def _bundle(tensors: Sequence[Tensor]) -> Tensor:
    """Flat uint8; a new one."""
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def _unbundle(memory: Tensor, layouts: Sequence[Layout]) -> list[Tensor]:
    ends = list(accumulate(layout.nbytes for layout in layouts))
    tensors = []
    for layout, end in zip(layouts, ends, strict=True):
        piece = memory[end - layout.nbytes : end]
        if len(layouts) > 1:  # bytes in the middle may be unaligned for a wider dtype
            piece = piece.clone()
        tensors.append(piece.view(getattr(torch, layout.dtype)).view(layout.shape))
    return tensors

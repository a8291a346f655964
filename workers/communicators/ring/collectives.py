"""What a ring computes: the mean of one bucket's gradients, and collectives that its members have agreed on.

The mean, by codec:

    no codec             summed around the ring
    bf16, fp16           summed around the ring in that dtype
    int8, sign, topk:F   every rank gathers all payloads, decodes them, and sums

Only bf16 and fp16 can be added without decoding. They are divided by the number of ranks
first, so the sum cannot overflow unless the mean does. Every addition rounds to the codec's
dtype: for n ranks the error is at most about n half units in the last place of the largest
partial sum. Parameters are not affected; they stay in full precision.

Gathered payloads are summed in rank order, so a rerun gives the same bits. Each payload goes
to all ranks: a rank sends n-1 payloads, where a sum sends 2(n-1)/n tensors.

torch.distributed runs a collective if it supports the operation and the dtype. Otherwise all
parts are gathered and every member reduces them with the hub's code. That is also done if
torch.distributed is inexact (Gloo loses NaN in a minimum) and for small tensors, where only
the number of messages matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import ceil, prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hubring.ps.compression import compressor
from hubring.ps.compression.codecs import Compressor, Half
from hubring.ps.compression.compressor import ErrorFeedback
from hubring.ps.core.messages import Call, Coded, Collective, ReduceOp
from hubring.ps.core.types import DtypeAndShape
from hubring.ps.core.work import Work
from hubring.ps.store.collective import WIDER, averaged, dealt_rows, reduced, rows_for
from hubring.workers.communicators.ring.process_group import Ring
from hubring.workers.communicators.ring.work import RingWork

PIECE = 1 << 20
"""Elements that are encoded together. With their residual they fit in the cache, as the hub's slices do."""

_LINE = 64
"""Alignment of pieces in a payload, in bytes."""


class Summed:
    """Sums in place, in the gradients' dtype or in that of a half-precision codec.

    Attributes:
        travels: Bytes that each rank sends and receives.
    """

    def __init__(self, ring: Ring, gradients: Tensor, codec: Half | None) -> None:
        self._ring = ring
        self._half = (
            None if codec is None else torch.empty(gradients.numel(), dtype=codec.dtype, device="cpu")
        )
        summed = gradients if self._half is None else self._half
        self.travels = 2 * (ring.exchangers - 1) * summed.nbytes // ring.exchangers

    def start(self, what: str, gradients: Tensor) -> Work:
        """Starts to replace the gradients with their mean over all ranks. Their memory may differ by step."""
        size, half = self._ring.size, self._half
        if not gradients.numel():
            return Work(what, 0)
        op = dist.ReduceOp.SUM
        if half is None and self._ring.backend == "shm":  # divides in the cache
            work, tensor, op = RingWork(what), gradients, dist.ReduceOp.AVG
        elif half is None:
            work, tensor = RingWork(what, lambda: gradients.div_(size)), gradients
        else:
            work, tensor = RingWork(what, lambda: gradients.copy_(half)), half
            for begin in range(0, half.numel(), PIECE):
                piece = slice(begin, begin + PIECE)
                half[piece].copy_(gradients[piece].mul(1 / size))
        options = dist.AllreduceOptions()
        options.reduceOp = op  # type: ignore[assignment]
        self._ring.start(work, lambda group: group.allreduce([tensor], options))
        return work


class Gathered:
    """Gathers payloads of a codec, with error feedback: the residual is added in the next step.

    Attributes:
        travels: As for `Summed`.
    """

    def __init__(self, ring: Ring, gradients: Tensor, codec: Compressor) -> None:
        self._ring = ring
        self._codec = codec
        pieces = torch.split(gradients, PIECE)
        self._feedback = [ErrorFeedback(codec, piece.numel(), piece.dtype) for piece in pieces]
        lengths = [codec.nbytes(piece.numel()) for piece in pieces]
        ends = list(accumulate(ceil(length / _LINE) * _LINE for length in lengths))
        begins = [0, *ends[:-1]]
        self._places = [slice(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]
        self._payloads = [torch.zeros(ends[-1], dtype=torch.uint8, device="cpu") for _ in range(ring.size)]
        self._mine = torch.zeros(ends[-1], dtype=torch.uint8, device="cpu")
        self._scratch = torch.empty_like(pieces[0])
        self.travels = ring.received * ends[-1]

    def start(self, what: str, gradients: Tensor) -> Work:
        """Starts as `Summed` does."""
        pieces = torch.split(gradients, PIECE)
        for piece, place, feedback in zip(pieces, self._places, self._feedback, strict=True):
            feedback.encode(piece, self._mine[place])
        work = RingWork(what, lambda: self._average(pieces))
        self._ring.start(work, lambda group: group.allgather([self._payloads], [self._mine]))
        return work

    @property
    def residuals(self) -> list[Tensor]:
        """The residuals of the pieces."""
        return [feedback.residual for feedback in self._feedback]

    def _average(self, pieces: Sequence[Tensor]) -> None:
        for piece, place in zip(pieces, self._places, strict=True):
            coded = [
                Coded(self._codec.name, payload[place], piece.numel(), piece.dtype)
                for payload in self._payloads
            ]
            compressor.mean_into(piece, self._codec, coded, self._scratch)


RingMean = Summed | Gathered
"""One bucket's exchange."""


def ring_mean(ring: Ring, gradients: Tensor, codec: Compressor | None) -> RingMean:
    """Returns the mean of tensors like `gradients` for a codec; None: no codec."""
    if codec is None or isinstance(codec, Half):
        return Summed(ring, gradients, codec)
    return Gathered(ring, gradients, codec)


REDUCTIONS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVERAGE: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}
"""Gloo has no average, so the average is a sum that is divided afterwards."""

_WIDER = {**WIDER, torch.bool: torch.int32, torch.int16: torch.int32}
"""Wider dtypes to reduce in, if Gloo does not support a dtype or would round it at every addition."""

SMALL = 4096
"""Up to this number of bytes, tensors are gathered and reduced in rank order, as on the hub."""


class Operation(NamedTuple):
    """One operation from this member's side."""

    ring: Ring
    calls: Sequence[Call]
    """The calls of all members, in rank order. They are consistent."""
    tensors: Sequence[Tensor]
    """This member's tensors."""
    root: int
    """The root's rank within the group."""

    @property
    def call(self) -> Call:
        """This member's call."""
        return self.calls[self.ring.rank]

    @property
    def what(self) -> str:
        return f"{self.call.collective.name.lower()} {self.call.name!r}"

    @property
    def at_root(self) -> bool:
        return self.ring.rank == self.root


def perform(operation: Operation) -> Sequence[Tensor]:
    """Runs an operation, waits for it and returns this member's results as new tensors.

    Raises:
        RingBroken: A member is lost.
    """
    match operation.call.collective:
        case Collective.ALLREDUCE:
            return _reduced(operation)
        case Collective.REDUCE:
            return _reduced(operation, at=operation.root)
        case Collective.REDUCE_SCATTER:
            # Gloo's reduce_scatter is an allreduce too, and needs rows that divide evenly.
            ring = operation.ring
            return [dealt_rows(tensor, ring.size)[ring.rank].clone() for tensor in _reduced(operation)]
        case Collective.ALLGATHER:
            return _joined(_gathered(operation))
        case Collective.GATHER:
            return _gathered_at_root(operation)
        case Collective.BROADCAST:
            return _broadcast(operation)
        case Collective.SCATTER:
            return _scattered(operation)
        case Collective.ALLTOALL:
            return _exchanged(operation)
        case _:  # a barrier or a group: done once all members have called it
            return []


def broadcast_into(ring: Ring, tensor: Tensor, root: int, what: str) -> None:
    """Overwrites a tensor with the root's tensor and waits."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    if tensor.numel():
        ring.run(what, lambda group: group.broadcast([tensor], options))


def _reduced(operation: Operation, at: int | None = None) -> list[Tensor]:
    """Returns the reduction on all members, or only on the member `at`."""
    op, nbytes = operation.call.op, sum(tensor.nbytes for tensor in operation.tensors)
    loses_nan = op in (ReduceOp.MIN, ReduceOp.MAX) and any(
        one.is_floating_point() for one in operation.tensors
    )
    if op is ReduceOp.ADASUM or loses_nan or nbytes <= SMALL:
        # Gather on all members even for one root: these cases are small or rare.
        totals = [reduced(parts, op) for parts in zip(*_gathered(operation), strict=True)]
    else:
        totals = _summed(operation, at)
    return totals if at is None or at == operation.ring.rank else []


def _summed(operation: Operation, at: int | None) -> list[Tensor]:
    """Reduces with torch.distributed, all tensors of one dtype together."""
    totals: dict[int, Tensor] = {}
    wide = [_WIDER.get(tensor.dtype, tensor.dtype) for tensor in operation.tensors]
    for dtype in dict.fromkeys(wide):
        places = [place for place, its in enumerate(wide) if its is dtype]
        parts = [operation.tensors[place].reshape(-1).to(dtype) for place in places]
        if operation.ring.on_host is not None and len(parts) == 1:
            flat = torch.empty_like(parts[0])
            _reduce_into(operation, flat, None, parts[0])
        else:
            flat = torch.cat(parts)
            _reduce_into(operation, flat, at)
        for place, piece in zip(
            places, torch.split(flat, [operation.tensors[one].numel() for one in places]), strict=True
        ):
            own = operation.tensors[place]
            totals[place] = piece.to(own.dtype).view(own.shape)
    return [totals[place] for place in range(len(wide))]


def _reduce_into(operation: Operation, flat: Tensor, at: int | None, *given: Tensor) -> None:
    """Reduces in place, or into `flat` what is given, which only one host's memory can."""
    ring, op = operation.ring, operation.call.op
    options: Any = dist.AllreduceOptions() if at is None else dist.ReduceOptions()
    divides = ring.on_host is not None and op is ReduceOp.AVERAGE
    options.reduceOp = dist.ReduceOp.AVG if divides else REDUCTIONS[op]
    if not flat.numel():
        return
    if at is None:
        ring.run(operation.what, lambda group: group.allreduce([flat], options, *given))
    else:
        options.rootRank = at
        ring.run(operation.what, lambda group: group.reduce([flat], options))
    if not divides:
        averaged(flat, ring.size, op)


def _gathered(operation: Operation) -> list[list[Tensor]]:
    """Returns the tensors of all members."""
    lengths = [_nbytes(call.layouts) for call in operation.calls]
    pieces = operation.ring.gather(operation.what, bundle(operation.tensors), lengths)
    return [unbundle(piece, call.layouts) for piece, call in zip(pieces, operation.calls, strict=True)]


def _joined(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [
        torch.cat([tensor.reshape(tensor.shape or (1,)) for tensor in tensors])
        for tensors in zip(*parts, strict=True)
    ]


def _gathered_at_root(operation: Operation) -> list[Tensor]:
    lengths = [_nbytes(call.layouts) for call in operation.calls]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: lengths[operation.ring.rank]] = bundle(operation.tensors)
    pieces = [torch.empty_like(padded) for _ in lengths] if operation.at_root else []
    options: Any = dist.GatherOptions()
    options.rootRank = operation.root
    if padded.numel():
        operation.ring.run(
            operation.what, lambda group: group.gather([pieces] if pieces else [], [padded], options)
        )
    return [
        tensor
        for piece, call in zip(pieces, operation.calls, strict=False)
        for tensor in unbundle(piece, call.layouts)
    ]


def _broadcast(operation: Operation) -> list[Tensor]:
    layouts = operation.calls[operation.root].layouts
    memory = (
        bundle(operation.tensors)
        if operation.at_root
        else torch.empty(_nbytes(layouts), dtype=torch.uint8, device="cpu")
    )
    broadcast_into(operation.ring, memory, operation.root, operation.what)
    return unbundle(memory, layouts)


def _scattered(operation: Operation) -> list[Tensor]:
    layouts = operation.calls[operation.root].layouts
    mine = torch.empty(max(layout.nbytes for layout in layouts), dtype=torch.uint8, device="cpu")
    pieces = [torch.zeros_like(mine) for _ in layouts] if operation.at_root else []
    for piece, tensor in zip(pieces, operation.tensors, strict=False):
        piece[: tensor.nbytes] = bundle([tensor])
    options: Any = dist.ScatterOptions()
    options.rootRank = operation.root
    if mine.numel():
        operation.ring.run(
            operation.what, lambda group: group.scatter([mine], [pieces] if pieces else [], options)
        )
    return unbundle(mine, [layouts[operation.ring.rank]])


def _exchanged(operation: Operation) -> list[Tensor]:
    splits = [rows_for(call, operation.ring.size) for call in operation.calls]
    received = [counts[operation.ring.rank] for counts in splits]
    layout = operation.call.layouts[0]
    width = prod(layout.shape[1:]) * getattr(torch, layout.dtype).itemsize
    memory = torch.empty(sum(received) * width, dtype=torch.uint8, device="cpu")
    given = [width * count for count in splits[operation.ring.rank]]
    taken = [width * count for count in received]
    if width and any(map(sum, splits)):
        own = bundle(operation.tensors)
        operation.ring.run(operation.what, lambda group: group.alltoall_base(memory, own, taken, given))
    rows = DtypeAndShape(layout.dtype, (sum(received), *layout.shape[1:]))
    return [*unbundle(memory, [rows]), torch.tensor(received, device="cpu")]


# Conversion between tensors and one flat tensor of bytes.


def _nbytes(layouts: Sequence[DtypeAndShape]) -> int:
    return sum(layout.nbytes for layout in layouts)


def bundle(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a new flat uint8 tensor."""
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device="cpu")


def unbundle(memory: Tensor, layouts: Sequence[DtypeAndShape]) -> list[Tensor]:
    """Returns the tensors that `bundle` has made bytes of."""
    ends = list(accumulate(layout.nbytes for layout in layouts))
    tensors = []
    for layout, end in zip(layouts, ends, strict=True):
        piece = memory[end - layout.nbytes : end]
        if len(layouts) > 1:  # bytes in the middle may be unaligned for a wider dtype
            piece = piece.clone()
        tensors.append(piece.view(getattr(torch, layout.dtype)).view(layout.shape))
    return tensors

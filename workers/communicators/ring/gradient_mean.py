"""The mean of one bucket's gradients on a ring.

    no codec             summed around the ring
    bf16, fp16           summed around the ring in that dtype
    int8, sign, topk:F   every rank gathers all payloads, decodes them, and sums

Only bf16 and fp16 can be added without decoding. They are divided by the number of ranks
first, so the sum cannot overflow unless the mean does. Every addition rounds to the codec's
dtype: for n ranks the error is at most about n half units in the last place of the largest
partial sum. Parameters are not affected; they stay in full precision.

Gathered payloads are summed in rank order, so a rerun gives the same bits. Each payload goes
to all ranks: a rank sends n-1 payloads, where a sum sends 2(n-1)/n tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import ceil
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hubring.ps.compression import compressor
from hubring.ps.compression.compressor import Compressor
from hubring.ps.compression.error_feedback import ErrorFeedback
from hubring.ps.compression.quantization import Half
from hubring.ps.core.messages import Coded
from hubring.ps.core.work import Work
from hubring.workers.communicators.ring.process_group import Ring
from hubring.workers.communicators.ring.work import RingWork

PIECE = 1 << 20
"""Elements that are encoded together. With their residual they fit in the cache, as the hub's slices do."""

_LINE = 64
"""Alignment of pieces in a payload, in bytes."""


class RingMean(Protocol):
    """One bucket's exchange."""

    travels: int
    """Bytes that each rank sends and receives."""

    def start(self, what: str, gradients: Tensor) -> Work:
        """Starts to replace the gradients with their mean over all ranks. Their memory may differ by step."""


class Summed:
    """Sums in place, in the gradients' dtype."""

    def __init__(self, ring: Ring, gradients: Tensor) -> None:
        self.travels = _around(ring, gradients)
        self._ring = ring

    def start(self, what: str, gradients: Tensor) -> Work:
        size = self._ring.size
        if not gradients.numel():
            return Work(what, 0)
        work = RingWork(what, lambda: gradients.div_(size))
        _sum(self._ring, gradients, work)
        return work


class SummedHalf:
    """Sums in bf16 or fp16."""

    def __init__(self, ring: Ring, gradients: Tensor, codec: Half) -> None:
        self._ring = ring
        self._half = torch.empty(gradients.numel(), dtype=codec.dtype)
        self.travels = _around(ring, self._half)

    def start(self, what: str, gradients: Tensor) -> Work:
        share = 1 / self._ring.size
        for begin in range(0, self._half.numel(), PIECE):
            piece = slice(begin, begin + PIECE)
            self._half[piece].copy_(gradients[piece].mul(share))
        work = RingWork(what, lambda: gradients.copy_(self._half))
        _sum(self._ring, self._half, work)
        return work


class Gathered:
    """Gathers payloads of a codec, with error feedback: the residual is added in the next step."""

    def __init__(self, ring: Ring, gradients: Tensor, codec: Compressor) -> None:
        self._ring = ring
        self._codec = codec
        pieces = torch.split(gradients, PIECE)
        self._feedback = [ErrorFeedback(codec, piece.numel(), piece.dtype) for piece in pieces]
        lengths = [codec.nbytes(piece.numel()) for piece in pieces]
        ends = list(accumulate(ceil(length / _LINE) * _LINE for length in lengths))
        begins = [0, *ends[:-1]]
        self._places = [slice(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]
        self._payloads = [torch.zeros(ends[-1], dtype=torch.uint8) for _ in range(ring.size)]
        self._mine = torch.zeros(ends[-1], dtype=torch.uint8)
        self._scratch = torch.empty_like(pieces[0])
        self.travels = (ring.size - 1) * ends[-1]

    def start(self, what: str, gradients: Tensor) -> Work:
        pieces = torch.split(gradients, PIECE)
        for piece, place, feedback in zip(pieces, self._places, self._feedback, strict=True):
            feedback.encode(piece, self._mine[place])
        work = RingWork(what, lambda: self._average(pieces))
        self._ring.start(work, lambda group: group.allgather([self._payloads], [self._mine]))
        return work

    def _average(self, pieces: Sequence[Tensor]) -> None:
        for piece, place in zip(pieces, self._places, strict=True):
            coded = [
                Coded(self._codec.name, payload[place], piece.numel(), piece.dtype)
                for payload in self._payloads
            ]
            compressor.mean_into(piece, self._codec, coded, self._scratch)


def ring_mean(ring: Ring, gradients: Tensor, codec: Compressor | None) -> RingMean:
    """Returns the mean of tensors like `gradients` for a codec; None: no codec."""
    if codec is None:
        return Summed(ring, gradients)
    if isinstance(codec, Half):
        return SummedHalf(ring, gradients, codec)
    return Gathered(ring, gradients, codec)


def _sum(ring: Ring, tensor: Tensor, work: RingWork) -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
    ring.start(work, lambda group: group.allreduce([tensor], options))


def _around(ring: Ring, tensor: Tensor) -> int:
    return 2 * (ring.size - 1) * tensor.nbytes // ring.size

"""Codecs: fewer bits for each element, or only the largest elements.

All but bf16 and fp16 compute in float32 for every source dtype. int8 and sign work in chunks, so that each
operation finds the previous result in the cache. A NaN or an infinity is preserved: with int8 and sign its
whole block decodes to values that are not finite, so an overflow check finds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from math import ceil

import numpy as np
import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError

BLOCK = 512
"""Elements that share a scale. The four bytes of a scale are less than one percent of int8's payload."""

_CHUNK = 1 << 18
"""Elements converted at a time: 1 MiB of float32, which fits with its result into a core's own cache.

Measured with 100 MB: int8 takes 40 % longer in chunks of 64 Ki, because of the overhead of each
torch call, and 50 % longer in one piece, which runs from main memory.
"""

_LEAST = 2.0**-100
"""A smaller scale is replaced by zero: its reciprocal could overflow."""


class Compressor(ABC):
    """A gradient codec. Sources are flat CPU tensors of any floating dtype.

    The number of bytes depends only on the number of elements. It has no state, so threads can share it.

    Attributes:
        name: The name that `compressor.by_name` takes.
        biased: Whether the next gradient must include what this one omits, so that training converges.
    """

    name: str
    biased = True

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Returns the payload's length for `numel` elements."""

    def check(self, payload: Tensor, numel: int) -> None:
        """Checks that `decode` can read a payload into `numel` elements.

        Raises:
            ConfigError: It cannot. The message gives the reason and the fix.
        """
        if payload.numel() != (nbytes := self.nbytes(numel)):
            raise ConfigError(
                f"the payload has {payload.numel()} bytes; {self.name} needs {nbytes} for the key's elements."
                " Run the same Hubring version on the server and all workers"
            )

    @abstractmethod
    def encode(self, source: Tensor, payload: Tensor) -> None:
        """Writes `source` into `payload`, which is flat uint8, `nbytes` long and aligned to four bytes."""

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Overwrites `out`, flat and of any floating dtype, with the decoded payload. Call `check` first."""


class Half(Compressor):
    """bf16 or fp16: a conversion, rounded to nearest even.

    fp16 turns values beyond 65504 into infinity instead of clamping them. A clamped gradient
    is silently wrong; a GradScaler detects an infinite one. Use bf16, with float32's range, if
    the range is uncertain.
    """

    biased = False

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype

    def nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, source: Tensor, payload: Tensor) -> None:
        payload.view(self.dtype).copy_(source)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(payload.view(self.dtype))


class Int8(Compressor):
    """Integers from -127 to 127, and a float32 scale per block: its largest magnitude / 127.

    Rounds to nearest, so a decoded element is off by at most half a scale, and a rerun gives the
    same bytes. Elements much smaller than their block's largest round to zero in every step.
    Adam cannot compensate for that, so int8 needs error feedback.
    """

    name = "int8"

    def nbytes(self, numel: int) -> int:
        return 4 * _blocks(numel) + numel

    def encode(self, source: Tensor, payload: Tensor) -> None:
        scales, codes = _parts(payload, source.numel())
        scratch = _scratch(source.numel())
        for begin, chunk in _chunks(source):
            magnitudes, whole = scratch[: chunk.numel()], slice(begin, begin + chunk.numel())
            torch.abs(chunk, out=magnitudes)
            largest = _by_block(torch.amax, magnitudes).div_(127)
            scales[begin // BLOCK :][: largest.numel()] = largest.masked_fill_(largest < _LEAST, 0)
            inverse = largest.reciprocal_().masked_fill_(largest.isinf(), 0)
            _scaled(chunk, inverse, magnitudes)
            codes.view(torch.int8)[whole].copy_(magnitudes.round_())

    def decode(self, payload: Tensor, out: Tensor) -> None:
        scales, codes = _parts(payload, out.numel())
        for begin, values in _to_scale(out, scales):
            values.copy_(codes.view(torch.int8)[begin : begin + _CHUNK])


class Sign(Compressor):
    """One bit per element, and the mean magnitude of each block (Seide et al. 2014; Bernstein et al. 2018).

    The mean magnitude minimises the mean square error of the block. Zero counts as positive.
    """

    name = "sign"

    def nbytes(self, numel: int) -> int:
        return 4 * _blocks(numel) + -(-numel // 8)

    def encode(self, source: Tensor, payload: Tensor) -> None:
        scales, bits = _parts(payload, source.numel())
        scratch = _scratch(source.numel())
        for begin, chunk in _chunks(source):
            magnitudes = torch.abs(chunk, out=scratch[: chunk.numel()])
            mean = _by_block(torch.mean, magnitudes)
            scales[begin // BLOCK :][: mean.numel()] = mean
            packed = np.packbits(chunk.numpy() >= 0)
            bits[begin // 8 :][: len(packed)] = torch.from_numpy(packed)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        scales, bits = _parts(payload, out.numel())
        for begin, values in _to_scale(out, scales):
            packed = bits[begin // 8 : (begin + _CHUNK) // 8].numpy()
            signs = torch.from_numpy(np.unpackbits(packed, count=values.numel())).view(torch.int8)
            values.copy_(signs.mul_(2).sub_(1))


def _parts(payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Returns the scales of the blocks, and the bytes of the elements."""
    head = 4 * _blocks(numel)
    return payload[:head].view(torch.float32), payload[head:]


def _to_scale(out: Tensor, scales: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields where each part of `out` begins, and float32 values to set, which then are multiplied."""
    scratch = _scratch(out.numel())
    for begin in range(0, out.numel(), _CHUNK):
        target = out[begin : begin + _CHUNK]
        values = target if out.dtype == torch.float32 else scratch[: target.numel()]
        yield begin, values
        _scaled(values, scales[begin // BLOCK :], values)
        if values is not target:
            target.copy_(values)


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _scratch(numel: int) -> Tensor:
    return torch.empty(min(numel, _CHUNK), dtype=torch.float32, device="cpu")


def _chunks(source: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields each chunk's start and the chunk in float32. The next chunk may overwrite it."""
    converted = None if source.dtype == torch.float32 else _scratch(source.numel())
    for begin in range(0, source.numel(), _CHUNK):
        chunk = source[begin : begin + _CHUNK]
        yield begin, chunk if converted is None else converted[: chunk.numel()].copy_(chunk)


def _by_block(reduce: Callable[..., Tensor], values: Tensor) -> Tensor:
    """Reduces each block to one number. The last block can be short."""
    whole = values.numel() // BLOCK * BLOCK
    reduced = [reduce(values[:whole].view(-1, BLOCK), dim=1)] if whole else []
    if whole < values.numel():
        reduced.append(reduce(values[whole:].view(1, -1), dim=1))
    return reduced[0] if len(reduced) == 1 else torch.cat(reduced)


def _scaled(values: Tensor, scales: Tensor, out: Tensor) -> None:
    """Multiplies each value by its block's scale. `out` may be `values`."""
    whole = values.numel() // BLOCK * BLOCK
    torch.mul(values[:whole].view(-1, BLOCK), scales[: whole // BLOCK, None], out=out[:whole].view(-1, BLOCK))
    if whole < values.numel():
        torch.mul(values[whole:], scales[whole // BLOCK], out=out[whole:])


_SAMPLE = 1 << 14
"""Elements to sample for a guess of the k-th largest magnitude."""

_SPARE = 1.3
"""Ratio of expected candidates to k. If there are fewer than k candidates, the guess is discarded."""

_LEAST_NORMAL = float(np.finfo(np.float32).tiny)
"""Smaller magnitudes are not candidates. In sparse gradients nearly all elements would be."""


class TopK(Compressor):
    """The largest elements by magnitude (Aji & Heafield 2017; Lin et al. 2018).

    The payload is int32 indices, then float32 values. It always holds the exact k largest elements, in
    the order of their indices. A sample gives a threshold that slightly more than k elements exceed, and
    only those are ranked. If fewer exceed it, all elements are ranked. A NaN counts as the largest. If
    fewer than k elements are nonzero, the first of them fills the rest.

    Args:
        fraction: Fraction of the elements to send. At least one is sent.
    """

    def __init__(self, fraction: float) -> None:
        self.name = f"topk:{fraction:.12f}".rstrip("0")
        self._fraction = fraction

    def nbytes(self, numel: int) -> int:
        return 8 * self._count(numel)

    def check(self, payload: Tensor, numel: int) -> None:
        super().check(payload, numel)
        if numel:
            lowest, highest = (int(index) for index in torch.aminmax(_indices(payload)))
            if lowest < 0 or highest >= numel:
                raise ConfigError(
                    f"a {self.name} payload has index {lowest if lowest < 0 else highest}, but the key has"
                    f" {numel} elements. Run the same Hubring version on the server and all workers"
                )

    def encode(self, source: Tensor, payload: Tensor) -> None:
        if not source.numel():
            return
        source = source if source.dtype == torch.float32 else source.float()
        count = self._count(source.numel())
        chosen = _largest(source.abs(), count)
        indices, values = _indices(payload), _values(payload)
        indices[: len(chosen)] = chosen
        torch.index_select(source, 0, chosen, out=values[: len(chosen)])
        indices[len(chosen) :], values[len(chosen) :] = indices[0], values[0]

    def decode(self, payload: Tensor, out: Tensor) -> None:
        out.zero_()
        out.scatter_(0, _indices(payload).long(), _values(payload).to(out.dtype))

    def _count(self, numel: int) -> int:
        return ceil(numel * self._fraction)


def _indices(payload: Tensor) -> Tensor:
    return payload[: payload.numel() // 2].view(torch.int32)


def _values(payload: Tensor) -> Tensor:
    return payload[payload.numel() // 2 :].view(torch.float32)


def _largest(magnitudes: Tensor, count: int) -> Tensor:
    """Returns the ascending indices of the `count` largest magnitudes.

    Returns fewer, but at least one, if the others are zero.
    """
    threshold = max(_LEAST_NORMAL, _guess(magnitudes, count))
    # The comparison is negated so that a NaN is a candidate.
    candidates = torch.from_numpy(np.flatnonzero(~(magnitudes.numpy() < np.float32(threshold))))
    if len(candidates) < count and threshold > _LEAST_NORMAL:
        candidates = torch.arange(len(magnitudes), device="cpu")
    if len(candidates) <= count:
        return candidates if len(candidates) else torch.zeros(1, dtype=torch.int64, device="cpu")
    ranked = torch.topk(magnitudes[candidates], count, sorted=False).indices
    return candidates[ranked.sort().values]


def _guess(magnitudes: Tensor, count: int) -> float:
    """Returns a magnitude that slightly more than `count` elements probably exceed; 0 if unknown."""
    sample = magnitudes[:: max(1, len(magnitudes) // _SAMPLE)]
    exceeding = ceil(_SPARE * count * len(sample) / len(magnitudes))
    if exceeding >= len(sample):
        return 0.0
    guess = float(torch.kthvalue(sample, len(sample) - exceeding).values)
    return guess if guess == guess else 0.0

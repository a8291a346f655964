"""Codecs that send every element with fewer bits: bf16, fp16, int8, sign.

bf16 and fp16 are one conversion. int8 and sign work in chunks, so that each operation finds the
previous result in the cache, and compute in float32 for every source dtype. A NaN or an infinity
is preserved: with int8 and sign its whole block decodes to values that are not finite, so an
overflow check finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

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


class Half:
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

    def check(self, payload: Tensor, numel: int) -> None:
        check_length(self.name, payload, self.nbytes(numel))

    def encode(self, source: Tensor, payload: Tensor) -> None:
        payload.view(self.dtype).copy_(source)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(payload.view(self.dtype))


class Int8:
    """Integers from -127 to 127, and a float32 scale per block: its largest magnitude / 127.

    Rounds to nearest, so a decoded element is off by at most half a scale, and a rerun gives the
    same bytes. Elements much smaller than their block's largest round to zero in every step.
    Adam cannot compensate for that, so int8 needs error feedback.
    """

    name = "int8"
    biased = True

    def nbytes(self, numel: int) -> int:
        return 4 * _blocks(numel) + numel

    def check(self, payload: Tensor, numel: int) -> None:
        check_length(self.name, payload, self.nbytes(numel))

    def encode(self, source: Tensor, payload: Tensor) -> None:
        scales, codes = self._parts(payload, source.numel())
        scratch = _scratch(source.numel())
        for begin, chunk in _chunks(source):
            magnitudes, whole = scratch[: chunk.numel()], slice(begin, begin + chunk.numel())
            torch.abs(chunk, out=magnitudes)
            largest = _by_block(torch.amax, magnitudes).div_(127)
            scales[begin // BLOCK :][: largest.numel()] = largest.masked_fill_(largest < _LEAST, 0)
            inverse = largest.reciprocal_().masked_fill_(largest.isinf(), 0)
            _scaled(chunk, inverse, magnitudes)
            codes[whole].copy_(magnitudes.round_())

    def decode(self, payload: Tensor, out: Tensor) -> None:
        scales, codes = self._parts(payload, out.numel())
        scratch = _scratch(out.numel())
        for begin in range(0, out.numel(), _CHUNK):
            target = out[begin : begin + _CHUNK]
            values = target if out.dtype == torch.float32 else scratch[: target.numel()]
            values.copy_(codes[begin : begin + _CHUNK])
            _scaled(values, scales[begin // BLOCK :], values)
            if values is not target:
                target.copy_(values)

    def _parts(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        head = 4 * _blocks(numel)
        return payload[:head].view(torch.float32), payload[head:].view(torch.int8)


class Sign:
    """One bit per element, and the mean magnitude of each block (Seide et al. 2014; Bernstein et al. 2018).

    The mean magnitude minimises the mean square error of the block. Zero counts as positive.
    """

    name = "sign"
    biased = True

    def nbytes(self, numel: int) -> int:
        return 4 * _blocks(numel) + -(-numel // 8)

    def check(self, payload: Tensor, numel: int) -> None:
        check_length(self.name, payload, self.nbytes(numel))

    def encode(self, source: Tensor, payload: Tensor) -> None:
        scales, bits = self._parts(payload, source.numel())
        scratch = _scratch(source.numel())
        for begin, chunk in _chunks(source):
            magnitudes = torch.abs(chunk, out=scratch[: chunk.numel()])
            mean = _by_block(torch.mean, magnitudes)
            scales[begin // BLOCK :][: mean.numel()] = mean
            packed = np.packbits(chunk.numpy() >= 0)
            bits[begin // 8 :][: len(packed)] = torch.from_numpy(packed)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        scales, bits = self._parts(payload, out.numel())
        scratch = _scratch(out.numel())
        for begin in range(0, out.numel(), _CHUNK):
            target = out[begin : begin + _CHUNK]
            values = target if out.dtype == torch.float32 else scratch[: target.numel()]
            packed = bits[begin // 8 : (begin + _CHUNK) // 8].numpy()
            signs = torch.from_numpy(np.unpackbits(packed, count=target.numel())).view(torch.int8)
            values.copy_(signs.mul_(2).sub_(1))
            _scaled(values, scales[begin // BLOCK :], values)
            if values is not target:
                target.copy_(values)

    def _parts(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        head = 4 * _blocks(numel)
        return payload[:head].view(torch.float32), payload[head:]


def check_length(name: str, payload: Tensor, nbytes: int) -> None:
    """Checks a payload's length.

    Raises:
        ConfigError: The length is wrong. The message gives both lengths.
    """
    if payload.numel() != nbytes:
        raise ConfigError(
            f"the payload has {payload.numel()} bytes; {name} needs {nbytes} for the key's elements."
            " Run the same Hubring version on the server and all workers"
        )


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _scratch(numel: int) -> Tensor:
    return torch.empty(min(numel, _CHUNK))


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

"""Codecs that keep every element, in fewer bits: bf16, fp16, int8, sign.

The floats of half width are one conversion. The others go chunk by chunk, so that
what one operation wrote the next one finds in the cache, and compute in float32
whatever the source's dtype. A NaN or an infinity survives: of int8 and sign the
whole block around it decodes to something that is not finite, so that whoever
looks for overflow finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError

BLOCK = 512
"""Elements that share a scale: its four bytes are then under one percent of int8's payload."""

_CHUNK = 1 << 18
"""Elements converted at a time: 1 MiB of float32, which fits beside its result into a core's own cache.

Measured over 100 MB: int8 takes 40 % longer by chunks of 64 Ki, where each torch
call's own microseconds show, and 50 % longer in one piece, from memory.
"""

_LEAST = 2.0**-100
"""A scale below it counts as zero: its reciprocal could overflow."""


class Half:
    """bf16 or fp16: a plain conversion, rounded to nearest even.

    What fp16 cannot hold (beyond 65504) becomes infinite rather than clamped: a
    clamped gradient is silently another one, while an infinite one is what a
    GradScaler looks for. Where the range is in doubt, bf16 has float32's.
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
    """Whole numbers from -127 to 127 and a float32 scale for every block: its largest magnitude / 127.

    Rounded to nearest, so a decoded element is off by at most half a scale, and a
    rerun is the same. Elements far smaller than their block's largest round to
    zero in every step, which Adam would never make up for; hence error feedback.
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
    """One bit an element and its block's mean magnitude (Seide et al. 2014; Bernstein et al. 2018).

    The mean magnitude is what comes closest to the block in the mean square.
    Zero counts as positive.
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
    """Refuses a payload of another length than the codec makes.

    Raises:
        ConfigError: Says how long it is and how long it must be.
    """
    if payload.numel() != nbytes:
        raise ConfigError(
            f"a payload of {payload.numel()} bytes, where {name} makes {nbytes} of the key's elements:"
            " start all workers and the server from the same version"
        )


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _scratch(numel: int) -> Tensor:
    return torch.empty(min(numel, _CHUNK))


def _chunks(source: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Where each chunk begins, and the chunk in float32; the next one may overwrite it."""
    converted = None if source.dtype == torch.float32 else _scratch(source.numel())
    for begin in range(0, source.numel(), _CHUNK):
        chunk = source[begin : begin + _CHUNK]
        yield begin, chunk if converted is None else converted[: chunk.numel()].copy_(chunk)


def _by_block(reduce: Callable[..., Tensor], values: Tensor) -> Tensor:
    """One number for every block; the last block may be short."""
    whole = values.numel() // BLOCK * BLOCK
    reduced = [reduce(values[:whole].view(-1, BLOCK), dim=1)] if whole else []
    if whole < values.numel():
        reduced.append(reduce(values[whole:].view(1, -1), dim=1))
    return reduced[0] if len(reduced) == 1 else torch.cat(reduced)


def _scaled(values: Tensor, scales: Tensor, out: Tensor) -> None:
    """Each value times its block's scale; `out` may be `values`."""
    whole = values.numel() // BLOCK * BLOCK
    torch.mul(values[:whole].view(-1, BLOCK), scales[: whole // BLOCK, None], out=out[:whole].view(-1, BLOCK))
    if whole < values.numel():
        torch.mul(values[whole:], scales[whole // BLOCK], out=out[whole:])

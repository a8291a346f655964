"""Top-k: a codec that sends the largest elements exactly."""

from __future__ import annotations

from math import ceil

import numpy as np
import torch
from torch import Tensor

from hubring.ps.compression.quantization import check_length
from hubring.ps.core.errors import ConfigError

_SAMPLE = 1 << 14
"""Elements to sample for a guess of the k-th largest magnitude."""

_SPARE = 1.3
"""Ratio of expected candidates to k. If there are fewer than k candidates, the guess is discarded."""

_LEAST = float(np.finfo(np.float32).tiny)
"""Smaller magnitudes are not candidates. In sparse gradients nearly all elements would be."""


class TopK:
    """The largest elements by magnitude (Aji & Heafield 2017; Lin et al. 2018).

    The payload is int32 indices, then float32 values. It always holds the exact k largest elements, in
    the order of their indices. A sample gives a threshold that slightly more than k elements exceed, and
    only those are ranked. If fewer exceed it, all elements are ranked. A NaN counts as the largest. If
    fewer than k elements are nonzero, the first of them fills the rest.

    Args:
        fraction: Fraction of the elements to send. At least one is sent.
    """

    biased = True

    def __init__(self, fraction: float) -> None:
        self.name = f"topk:{fraction:.12f}".rstrip("0")
        self._fraction = fraction

    def nbytes(self, numel: int) -> int:
        return 8 * self._count(numel)

    def check(self, payload: Tensor, numel: int) -> None:
        check_length(self.name, payload, self.nbytes(numel))
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
    threshold = max(_LEAST, _guess(magnitudes, count))
    # The comparison is negated so that a NaN is a candidate.
    candidates = torch.from_numpy(np.flatnonzero(~(magnitudes.numpy() < np.float32(threshold))))
    if len(candidates) < count and threshold > _LEAST:
        candidates = torch.arange(len(magnitudes))
    if len(candidates) <= count:
        return candidates if len(candidates) else torch.zeros(1, dtype=torch.int64)
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

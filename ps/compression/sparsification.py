"""Top-k: the codec that keeps few elements, and those exactly."""

from __future__ import annotations

from math import ceil

import numpy as np
import torch
from torch import Tensor

from hubring.ps.compression.quantization import check_length
from hubring.ps.core.errors import ConfigError

_SAMPLE = 1 << 14
"""Elements looked at to guess from which magnitude on the largest k are."""

_SPARE = 1.3
"""How many more candidates than k the guess aims at; below k the guess is dropped."""

_LEAST = float(np.finfo(np.float32).tiny)
"""Smaller magnitudes are nobody's candidates: in sparse gradients nearly all would be."""


class TopK:
    """The largest elements by magnitude (Aji & Heafield 2017; Lin et al. 2018): int32 places, float32 values.

    Always the exact k largest of what it is given, in the order of their places.
    A sample guesses a threshold that some more than k exceed, and only those are
    ranked; should fewer exceed it, all are. A NaN counts as the largest of all.
    Where fewer than k differ from zero, the first of them fills the rest.

    Args:
        fraction: Of the elements; at least one travels.
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
            lowest, highest = (int(place) for place in torch.aminmax(_places(payload)))
            if lowest < 0 or highest >= numel:
                raise ConfigError(
                    f"{self.name} brought an element for place {lowest if lowest < 0 else highest}, where"
                    f" there are {numel} from 0 on: start all workers and the server from the same version"
                )

    def encode(self, source: Tensor, payload: Tensor) -> None:
        if not source.numel():
            return
        source = source if source.dtype == torch.float32 else source.float()
        count = self._count(source.numel())
        chosen = _largest(source.abs(), count)
        places, values = _places(payload), _values(payload)
        places[: len(chosen)] = chosen
        torch.index_select(source, 0, chosen, out=values[: len(chosen)])
        places[len(chosen) :], values[len(chosen) :] = places[0], values[0]

    def decode(self, payload: Tensor, out: Tensor) -> None:
        out.zero_()
        out.scatter_(0, _places(payload).long(), _values(payload).to(out.dtype))

    def _count(self, numel: int) -> int:
        return ceil(numel * self._fraction)


def _places(payload: Tensor) -> Tensor:
    return payload[: payload.numel() // 2].view(torch.int32)


def _values(payload: Tensor) -> Tensor:
    return payload[payload.numel() // 2 :].view(torch.float32)


def _largest(magnitudes: Tensor, count: int) -> Tensor:
    """Places of the `count` largest, ascending; of fewer, but one at least, if the others are zero."""
    threshold = max(_LEAST, _guess(magnitudes, count))
    # Asked this way round, since a NaN is not below anything.
    candidates = torch.from_numpy(np.flatnonzero(~(magnitudes.numpy() < np.float32(threshold))))
    if len(candidates) < count and threshold > _LEAST:
        candidates = torch.arange(len(magnitudes))
    if len(candidates) <= count:
        return candidates if len(candidates) else torch.zeros(1, dtype=torch.int64)
    ranked = torch.topk(magnitudes[candidates], count, sorted=False).indices
    return candidates[ranked.sort().values]


def _guess(magnitudes: Tensor, count: int) -> float:
    """A magnitude that a few more than `count` are likely to exceed; 0 where that cannot be told."""
    sample = magnitudes[:: max(1, len(magnitudes) // _SAMPLE)]
    exceeding = ceil(_SPARE * count * len(sample) / len(magnitudes))
    if exceeding >= len(sample):
        return 0.0
    guess = float(torch.kthvalue(sample, len(sample) - exceeding).values)
    return guess if guess == guess else 0.0

"""The time of an allreduce over its size: fitted with three terms, or as measured between two sizes.

t(M) = alpha + fill sqrt(M) + M / rate. An allreduce sends chunks through a pipeline. With the best chunk its
time is alpha + 2 sqrt(hops alpha M / rate) + M / rate (Thakur et al., IJHPCA 2005), so the middle term grows
with the square root of the size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import exp, log, sqrt

import numpy as np
from msgspec import Struct

BEYOND = 1.1
"""Factor by which a fitted rate may exceed the measured one."""
Rows = Sequence[tuple[int, float]]
"""Bytes and seconds, by rising size."""


class Curve(Struct, frozen=True):
    """Three terms of an allreduce's time.

    Attributes:
        alpha: Seconds of the smallest message.
        fill: Seconds per square root of a byte, in which a pipeline fills and drains.
        rate: Bytes per second of the largest message (nccl-tests' algbw).
    """

    alpha: float
    fill: float
    rate: float

    def seconds(self, nbytes: float) -> float:
        return self.alpha + self.fill * sqrt(nbytes) + nbytes / self.rate


def fitted(rows: Rows) -> Curve:
    """Returns the curve with the least relative errors; no term is negative. One row gives only a rate.

    The rate is at most `BEYOND` times that of the largest size, or of what the two largest sizes differ by: a
    sweep that ends early looks as if it would go on rising.
    """
    sizes = np.array([size for size, _ in rows], float)
    times = np.array([seconds for _, seconds in rows], float)
    terms = np.stack([np.ones_like(sizes), np.sqrt(sizes)]) / times
    reached = float((sizes / times).max())
    best, least = Curve(0.0, 0.0, reached), np.inf
    most = BEYOND * max(reached, _last_rate(rows))
    for rate in np.linspace(reached, most, 21).tolist() if len(rows) > 1 else ():
        wanted = 1 - sizes / rate / times
        for chosen in ([], [0], [1], [0, 1]):
            found = np.linalg.lstsq(terms[chosen].T, wanted, rcond=None)[0]
            error = float(np.square(terms[chosen].T @ found - wanted).sum())
            if (found >= 0).all() and error < least:
                values = dict(zip(chosen, found.tolist(), strict=True))
                least, best = error, Curve(values.get(0, 0.0), values.get(1, 0.0), rate)
    return best


def _last_rate(rows: Rows) -> float:
    """Returns the bytes per second by which the largest size is larger; 0 if it is not slower."""
    (small, fast), (large, slow) = rows[-2:] if len(rows) > 1 else ((0, 0.0), *rows)
    return (large - small) / (slow - fast) if slow > fast else 0.0


def measured(rows: Rows, nbytes: float) -> float | None:
    """Returns the seconds between two measured sizes, linear in the logarithms; None outside of them."""
    for (small, fast), (large, slow) in pairwise(rows):
        if small <= nbytes <= large:
            share = log(nbytes / small) / log(large / small)
            return exp(log(fast) + share * log(slow / fast))
    return None

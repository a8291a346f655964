"""What of an exchange backward hides: all but the last group of buckets, and only what is ready in time.

A group of buckets leaves once backward has reached its last parameter. Its exchange follows those of earlier
groups. So the last group leaves when backward ends, and nothing hides it. Workers try sizes of groups
(`hubring.workers.reducer.tuning`) and keep the first unless another makes the whole step clearly shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from hubring.ps.core.timing import fastest
from hubring.workers.compare.cost.model.slicing import bucket_sizes, filled

GROUP_BYTES = (25 << 20, 4 << 20, 10 << 20, 64 << 20)
"""Sizes of groups that workers try (`hubring.workers.reducer.tuning`)."""


def hidden(busy: float, backward: float, rest: float, nbytes: int, tensors: tuple[int, ...] = ()) -> float:
    """Returns the seconds of an exchange that backward hides, with the groups that workers choose.

    Args:
        busy: Seconds that the busiest link or processor works for the exchange.
        backward: Seconds of backward that exchanges can overlap with.
        rest: The other seconds of the step: forward, and what of the exchange never overlaps.
        nbytes: Bytes of the model.
        tensors: Bytes of its parameters in the order of registration; empty: unknown.
    """
    if not (busy > 0 and backward > 0):
        return 0.0
    found = {
        size: shown(busy, backward, _groups(nbytes, tensors, size), even=not tensors) for size in GROUP_BYTES
    }
    chosen = fastest({size: rest + backward + seconds for size, seconds in found.items()})
    return busy - found[chosen]


@lru_cache(maxsize=256)
def _groups(nbytes: int, tensors: tuple[int, ...], most: int) -> tuple[int, ...]:
    return tuple(filled(bucket_sizes(nbytes, tensors), most))


def shown(busy: float, backward: float, groups: Sequence[int], *, even: bool = False) -> float:
    """Returns the seconds that an exchange lasts beyond backward.

    Args:
        busy: Seconds of the whole exchange.
        backward: Seconds of backward; gradients are ready in proportion to their bytes.
        groups: Bytes of each group in the order of backward, at least one.
        even: All groups but the last are equal.
    """
    total, count = sum(groups), len(groups)
    # With equal groups the end is linear in the first group without a pause, so it is latest at an end.
    firsts = {0, max(0, count - 2), count - 1} if even else range(count)

    def end(first: int) -> float:
        """Returns when the exchange ends if it has no pause from this group on."""
        done = sum(groups[:first])
        later = total - done - groups[first]
        return (busy * (total - done) - backward * later) / total

    return max(end(first) for first in firsts)

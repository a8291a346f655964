"""Buckets that are sent together.

Small buckets can leave early; large exchanges cost less per byte. Which matters more
must be measured (`hubring.workers.reducer.tuning`). So buckets are small and form
groups of variable size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.bucketing import join
from hubring.workers.buckets.layout import Kind, kind_of


class BucketGroup(NamedTuple):
    """Buckets of one kind that are sent once all of them are ready.

    Attributes:
        buckets: At least one bucket, in order of index.
        loads: The buckets passed to the communicator: `buckets`, or one bucket that joins them.
    """

    buckets: tuple[Bucket, ...]
    loads: tuple[Bucket, ...]


def bucket_groups(buckets: Iterable[Bucket], nbytes: int, *, joined: bool) -> list[BucketGroup]:
    """Puts buckets into groups of at most `nbytes`, ordered by the index of their last bucket.

    Args:
        buckets: In order of index, which is the order of backward.
        nbytes: Maximum size of a group. A larger bucket forms its own group.
        joined: Exchange each group as one bucket. Its buckets must be adjacent in memory.
    """
    groups: list[list[Bucket]] = []
    newest: dict[Kind, list[Bucket]] = {}
    filled: Counter[Kind] = Counter()
    for bucket in buckets:
        kind, size = kind_of(bucket), bucket.gradients.nbytes
        if kind not in newest or filled[kind] + size > nbytes:
            newest[kind], filled[kind] = [], 0
            groups.append(newest[kind])
        newest[kind].append(bucket)
        filled[kind] += size
    groups.sort(key=lambda group: group[-1].spec.index)
    return [BucketGroup(tuple(group), _loads(group, joined)) for group in groups]


def _loads(group: Sequence[Bucket], joined: bool) -> tuple[Bucket, ...]:
    return (join(group),) if joined and len(group) > 1 else tuple(group)

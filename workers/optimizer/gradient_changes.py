"""Finds out what a script does to gradients between backward and step.

A hub steps as soon as it has the gradients, so what is changed after they were
handed over would be lost: clipping, unscaling, a learning rate set just before
`step()`. PyTorch counts the in-place changes of a tensor in its version, and
views share it, so one number a bucket shows them all. (A change through
`.grad.data` is not counted, here as in autograd itself.)
"""

from __future__ import annotations

from collections.abc import Callable

from hubring.ps.core.types import Hyper
from hubring.workers.buckets.bucketing import Bucket

CHANGED = "changes gradients between backward and step, as clipping does"


class ChangeWatch:
    """Remembers how backward left things and tells what was changed since."""

    def __init__(self, buckets: list[Bucket], hyper: Callable[[Bucket], Hyper]) -> None:
        self._buckets = buckets
        self._hyper = hyper
        self._counts: dict[int, int] = {}
        self._hypers: list[Hyper] = []
        self._dropped = False

    def begin_pass(self) -> None:
        """A backward pass begins; what happened to gradients until now is part of what it adds to."""
        self._counts = {}

    def note_gradients(self, bucket: Bucket) -> None:
        """This bucket's last gradient was accumulated just now."""
        self._counts[bucket.spec.index] = bucket.changes

    def note_end(self) -> None:
        """A pass has ended; a bucket that lacks gradients is as it is."""
        for bucket in self._buckets:
            self._counts.setdefault(bucket.spec.index, bucket.changes)
        self._hypers = [self._hyper(bucket) for bucket in self._buckets]

    def note_dropped(self) -> None:
        """Gradients of a backward pass were thrown away without a step."""
        self._dropped = True

    def changes(self) -> str:
        """What the script changed since backward, in words; empty for nothing."""
        if self._dropped:
            return "throws gradients away without a step"
        if any(self._is_changed(bucket) for bucket in self._buckets):
            return CHANGED
        if self._hypers and self._hypers != [self._hyper(bucket) for bucket in self._buckets]:
            return "changes hyperparameters between backward and step"
        return ""

    def reset(self) -> None:
        """Begins the next step; what was dropped before the first one is not forgotten."""
        self._counts = {}
        self._hypers = []

    def _is_changed(self, bucket: Bucket) -> bool:
        noted = self._counts.get(bucket.spec.index)
        return noted is not None and (noted != bucket.changes or not bucket.holds_gradients())

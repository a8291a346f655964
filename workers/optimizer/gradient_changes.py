"""Detects changes to gradients and hyperparameters between backward and step.

A hub steps as soon as it has the gradients. A change after they are sent would be lost:
clipping, unscaling, a learning rate set just before `step()`. PyTorch counts in-place
changes in a tensor's version, which views share, so one number per bucket detects them.
A change through `.grad.data` is not counted, as in autograd itself.
"""

from __future__ import annotations

from collections.abc import Callable

from hubring.ps.core.types import Hyper
from hubring.workers.buckets.bucketing import Bucket

CHANGED = "changes gradients between backward and step, as clipping does"


class ChangeWatch:
    """Records gradients and hyperparameters at the end of backward and detects later changes."""

    def __init__(self, buckets: list[Bucket], hyper: Callable[[Bucket], Hyper]) -> None:
        self._buckets = buckets
        self._hyper = hyper
        self._counts: dict[int, int] = {}
        self._hypers: list[Hyper] = []
        self._dropped = False

    def begin_pass(self) -> None:
        """Starts a backward pass. Changes before it are allowed: the pass adds to the changed gradients."""
        self._counts = {}

    def note_gradients(self, bucket: Bucket) -> None:
        """Records a bucket whose last gradient was just accumulated."""
        self._counts[bucket.spec.index] = bucket.changes

    def note_end(self) -> None:
        """Records the end of a pass, including buckets that did not get all gradients."""
        for bucket in self._buckets:
            self._counts.setdefault(bucket.spec.index, bucket.changes)
        self._hypers = [self._hyper(bucket) for bucket in self._buckets]

    def note_dropped(self) -> None:
        """Records that gradients were discarded without a step."""
        self._dropped = True

    def changes(self) -> str:
        """Returns what the script changed since backward, as text; empty if nothing."""
        if self._dropped:
            return "discards gradients without a step"
        if any(self._is_changed(bucket) for bucket in self._buckets):
            return CHANGED
        if self._hypers and self._hypers != [self._hyper(bucket) for bucket in self._buckets]:
            return "changes hyperparameters between backward and step"
        return ""

    def reset(self) -> None:
        """Prepares for the next step. Discarded gradients stay on record."""
        self._counts = {}
        self._hypers = []

    def _is_changed(self, bucket: Bucket) -> bool:
        noted = self._counts.get(bucket.spec.index)
        return noted is not None and (noted != bucket.changes or not bucket.holds_gradients())

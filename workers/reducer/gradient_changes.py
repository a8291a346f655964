"""Detects changes to gradients, parameters and hyperparameters between backward and step.

A hub steps as soon as it has the gradients. A change after they are sent would be lost:
clipping, unscaling, a learning rate set just before `step()`. PyTorch counts in-place
changes in a tensor's version, which views share, so one number per bucket detects them.
A change through `.grad.data` is not counted. In the first step, which decides when gradients
are sent, their bytes are compared instead, so that it is found too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from hubring.ps.core.types import Hyper
from hubring.workers.buckets.bucket import Bucket

CHANGED = "changes gradients between backward and step, as clipping does"


class Noted(NamedTuple):
    """A bucket's gradients at the end of a backward pass."""

    changes: int
    missing: tuple[int, ...]
    copy: torch.Tensor | None
    written: dict[int, torch.Tensor]
    """Parameters that the script has changed since the last step, by position."""


class ChangeWatch:
    """Records gradients and hyperparameters at the end of backward and detects later changes.

    Attributes:
        exact: Whether to compare bytes.
    """

    def __init__(self, buckets: list[Bucket], hyper: Callable[[Bucket], Hyper], *, exact: bool) -> None:
        self.exact = exact
        self._buckets = buckets
        self._hyper = hyper
        self._noted: dict[int, Noted] = {}
        self._hypers: list[Hyper] = []
        self._dropped = False

    @property
    def has_noted(self) -> bool:
        """Whether gradients are on record."""
        return bool(self._noted)

    def begin_pass(self) -> None:
        """Starts a backward pass. Changes before it are allowed: the pass adds to the changed gradients."""
        self._noted = {}

    def note_gradients(self, bucket: Bucket, *, writes: bool) -> None:
        """Records a bucket whose last gradient was just accumulated.

        Args:
            bucket: The bucket.
            writes: Whether the script had changed parameters before this pass.
        """
        copy = bucket.gradients.clone() if self.exact else None
        positions = bucket.written() if writes else ()
        written = {position: bucket.parameters[position].detach().clone() for position in positions}
        self._noted[bucket.spec.index] = Noted(bucket.changes, bucket.missing(), copy, written)

    def forget(self, bucket: Bucket) -> None:
        """Drops the record of a bucket that is not complete after all; `note_end` records it."""
        self._noted.pop(bucket.spec.index, None)

    def note_end(self, *, writes: bool) -> None:
        """Records the end of a pass, and buckets that did not get all gradients; see `note_gradients`."""
        for bucket in self._buckets:
            if bucket.spec.index not in self._noted:
                self.note_gradients(bucket, writes=writes)
        self._hypers = [self._hyper(bucket) for bucket in self._buckets]

    def note_dropped(self) -> None:
        """Records that gradients were discarded without a step."""
        self._dropped = True

    def changes(self) -> str:
        """Returns what the script changed since backward, as text; empty if nothing."""
        if any(self._is_changed(bucket) for bucket in self._buckets):
            return CHANGED
        if any(self._is_written(bucket) for bucket in self._buckets):
            return "changes parameters between backward and step"
        if self._hypers and self._hypers != [self._hyper(bucket) for bucket in self._buckets]:
            return "changes hyperparameters between backward and step"
        return ""

    def habits(self) -> str:
        """Returns what the script did so far that a gradient must not be sent before, as text."""
        return "discards gradients without a step" if self._dropped else self.changes()

    def reset(self) -> None:
        """Prepares for the next step. Discarded gradients stay on record."""
        self._noted = {}
        self._hypers = []

    def _is_changed(self, bucket: Bucket) -> bool:
        noted = self._noted.get(bucket.spec.index)
        if noted is None:
            return False
        if (noted.changes, noted.missing) != (bucket.changes, bucket.missing()):
            return True
        if not bucket.holds_gradients():
            return True
        return noted.copy is not None and not _same_bytes(noted.copy, bucket.gradients)

    def _is_written(self, bucket: Bucket) -> bool:
        noted = self._noted.get(bucket.spec.index)
        if noted is None:
            return False
        written = bucket.written()
        return written != list(noted.written) or any(
            not _same_bytes(noted.written[position], bucket.parameters[position].detach())
            for position in written
        )


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))

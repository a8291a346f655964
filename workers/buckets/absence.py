"""Parameters without a gradient: on this rank, and on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hubring.ps.job.slice_parameters import ParameterPart
from hubring.workers.buckets.bucket import Bucket

OnAbsent = Callable[[tuple[int, ...]], None]
"""Receives which of a slice's parts have no gradient on every rank."""


class SliceAbsence(NamedTuple):
    """The parts of one slice without a gradient in one exchange; by default none.

    Attributes:
        indices: The parts, in ascending order.
        report: Receives the answer's parts.
    """

    indices: tuple[int, ...] = ()
    report: OnAbsent | None = None

    def on_reply(self, also: OnAbsent | None = None) -> OnAbsent | None:
        """Returns what to do with the answer to the slice, first `also`; None if there is nothing to do."""
        calls = [call for call in (also, self.report) if call is not None]
        if not self.indices or not calls:
            return None

        def note(absent: tuple[int, ...]) -> None:
            for call in calls:
                call(absent)

        return note


class Absence:
    """The parameters without a gradient in one exchange of a bucket. Costs nothing if there are none.

    Args:
        bucket: The bucket that is about to be sent.
        reports: Whether to leave only the parameters that are absent on every rank in `bucket.absent`.
    """

    def __init__(self, bucket: Bucket, *, reports: bool) -> None:
        self._positions = bucket.absent
        self._bucket = bucket
        self._reports = reports

    def in_slice(self, parts: Sequence[ParameterPart]) -> SliceAbsence:
        """Returns the absence of a slice's parts."""
        if not self._positions:
            return SliceAbsence()
        indices = tuple(index for index, part in enumerate(parts) if part.position in self._positions)

        def report(absent: tuple[int, ...]) -> None:
            elsewhere = set(indices).difference(absent)
            self._bucket.absent = self._bucket.absent.difference(parts[index].position for index in elsewhere)

        return SliceAbsence(indices, report if self._reports else None)

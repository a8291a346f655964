"""Parameters without a gradient: on this rank, and on every rank."""

from __future__ import annotations

from collections.abc import Callable

from hubring.workers.buckets.bucket import Bucket

OnAbsent = Callable[[tuple[int, ...]], None]
"""Receives the positions of the parameters without a gradient on every rank."""


class Absence:
    """The parameters without a gradient in one exchange of a bucket. Costs nothing if there are none.

    Args:
        bucket: The bucket that is about to be sent.
        reports: Whether to leave only the parameters that are absent on every rank in `bucket.absent`.
    """

    def __init__(self, bucket: Bucket, *, reports: bool) -> None:
        self.positions = tuple(sorted(bucket.absent))
        self._bucket = bucket
        self._reports = reports

    def on_reply(self, also: OnAbsent | None = None) -> OnAbsent | None:
        """Returns what to do with the answer to one slice, first `also`; None if there is nothing to do."""
        if not self.positions or not (self._reports or also):
            return None

        def note(absent: tuple[int, ...]) -> None:
            if also is not None:
                also(absent)
            if self._reports:
                self._bucket.absent = self._bucket.absent.intersection(absent)

        return note

"""Measures exchanges in flight: spans for the trace, and the time that overlapped with compute."""

from __future__ import annotations

import threading
import time

from hubring.ps.core.trace import Trace
from hubring.ps.core.work import Work


class FlightRecorder:
    """Follows one worker's exchanges.

    Args:
        trace: Gets a row for each bucket, one for the waits and one for the steps.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._lock = threading.Lock()
        self._in_flight = 0
        self._busy_since = 0
        self._busy = 0
        self._waited = 0
        self._stepped = time.monotonic_ns()

    @property
    def hidden_seconds(self) -> float:
        """Seconds in which an exchange was in flight and training did not wait."""
        with self._lock:
            return max(0, self._busy - self._waited) / 1e9

    def sent(self, bucket: int, work: Work, began: int) -> None:
        """Follows an exchange until it is done.

        Args:
            bucket: Index of the bucket; the first index if several buckets are joined.
            work: The exchange.
            began: Start of the send, by `time.monotonic_ns`.
        """
        with self._lock:
            if self._in_flight == 0:
                self._busy_since = began
            self._in_flight += 1
        work.when_done(lambda _: self._done(bucket, began))

    def waited(self, began: int, ended: int, why: str = "wait") -> None:
        """Records that training waited from `began` to `ended`, by `time.monotonic_ns`."""
        self._waited += ended - began
        self._trace.span("training waits", why, began, ended)

    def stepped(self, step: int) -> None:
        """Records the end of a step."""
        began, self._stepped = self._stepped, time.monotonic_ns()
        self._trace.span("steps", f"step {step}", began, self._stepped)

    def close(self) -> None:
        """Closes the trace."""
        self._trace.close()

    def _done(self, bucket: int, began: int) -> None:
        ended = time.monotonic_ns()
        with self._lock:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._busy += ended - self._busy_since
        self._trace.span(f"bucket {bucket}", "exchange", began, ended)

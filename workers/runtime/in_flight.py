"""What buckets were on their way while training went on, for the trace and the count of what was hidden."""

from __future__ import annotations

import threading
import time

from hubring.ps.core.trace import Trace
from hubring.ps.core.work import Work


class FlightRecorder:
    """Follows one worker's exchanges.

    Args:
        trace: Where each is drawn: a row for every bucket, one for the waiting and one for the steps.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._lock = threading.Lock()
        self._flying = 0
        self._took_off = 0
        self._flown = 0
        self._waited = 0
        self._stepped = time.monotonic_ns()

    @property
    def hidden_seconds(self) -> float:
        """How long something was on its way that training did not wait for."""
        with self._lock:
            return max(0, self._flown - self._waited) / 1e9

    def handed(self, bucket: int, work: Work, began: int) -> None:
        """Follows what was just handed over, until it is back.

        Args:
            bucket: Its index; of buckets that travel as one, the first's.
            work: Of the exchange.
            began: By `time.monotonic_ns`, when handing over began.
        """
        with self._lock:
            if self._flying == 0:
                self._took_off = began
            self._flying += 1
        work.when_done(lambda _: self._back(bucket, began))

    def waited(self, began: int, ended: int, why: str = "wait") -> None:
        """Notes that training stood still from `began` to `ended`, by `time.monotonic_ns`."""
        self._waited += ended - began
        self._trace.span("training waits", why, began, ended)

    def stepped(self, step: int) -> None:
        """Notes that a step is over."""
        began, self._stepped = self._stepped, time.monotonic_ns()
        self._trace.span("steps", f"step {step}", began, self._stepped)

    def close(self) -> None:
        """Writes the trace's end."""
        self._trace.close()

    def _back(self, bucket: int, began: int) -> None:
        ended = time.monotonic_ns()
        with self._lock:
            self._flying -= 1
            if self._flying == 0:
                self._flown += ended - self._took_off
        self._trace.span(f"bucket {bucket}", "exchange", began, ended)

"""Measures how long this worker's training thread waits, for the heartbeat, and names the slowest worker."""

from __future__ import annotations

from threading import get_ident

from hubring.ps.core.errors import DeadlineExceeded
from hubring.ps.core.timing import SystemTime, TimeSource

LOG_EVERY = 10.0
"""Seconds between log lines about a long wait."""


class Waiting:
    """A context that waiting threads enter and another thread reads. The longest wait counts.

    Attributes:
        slowest: The worker that the others wait for, in words; empty if the server knows none. A
            DeadlineExceeded that leaves the context names it.
    """

    def __init__(self, clock: TimeSource | None = None) -> None:
        self.slowest = ""
        self._clock = clock or SystemTime()
        self._waits: list[tuple[int, float]] = []
        """Thread and beginning of each wait, also within a wait. Each change is a single operation."""
        self._logged: tuple[float, int] | None = None

    def __enter__(self) -> None:
        if not self._waits:
            self.slowest = ""
        self._waits.append((get_ident(), self._clock.now()))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        own = get_ident()
        self._waits.remove(max(wait for wait in self._waits.copy() if wait[0] == own))
        named = error is not None and isinstance(error.__cause__, DeadlineExceeded)  # by an inner wait
        if isinstance(error, DeadlineExceeded) and self.slowest and not named:
            raise DeadlineExceeded(f"{error}. The slowest is {self.slowest}") from error

    @property
    def seconds(self) -> float:
        """Seconds since the longest wait began; 0 if no thread waits."""
        since = self._since()
        return 0.0 if since is None else self._clock.now() - since

    def due(self) -> float | None:
        """Returns the seconds waited, once every LOG_EVERY seconds, and None in between."""
        since = self._since()
        if since is None:
            return None
        seconds = self._clock.now() - since
        wait = (since, int(seconds / LOG_EVERY))
        if seconds < LOG_EVERY or wait == self._logged:
            return None
        self._logged = wait
        return seconds

    def _since(self) -> float | None:
        return min((began for _, began in self._waits.copy()), default=None)


def wait_message(seconds: float, step: int, slowest: str) -> str:
    """Formats the log line of a waiting worker.

    `slowest` is empty if all workers wait, or if there is no other worker.
    """
    waited = f"waiting for {seconds:.0f} s at step {step}"
    if not slowest:
        return (
            f"{waited}: no other worker is behind. Check that all ranks call the same collectives and that"
            " the hub is not overloaded"
        )
    return (
        f"{waited}: the slowest is {slowest}. It computes, loads data or hangs; see its log, or its stack:"
        " py-spy dump --pid PID"
    )

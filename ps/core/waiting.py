"""How long this worker's training thread has been held up, for the heartbeat to tell."""

from __future__ import annotations

from hubring.ps.core.timing import SystemTime, TimeSource

TOLD_EVERY = 10.0
"""Seconds after which whoever waits is told for whom, again and again."""


class Waiting:
    """Entered by the thread that waits, asked by another. One thread waits at a time."""

    def __init__(self, clock: TimeSource | None = None) -> None:
        self._clock = clock or SystemTime()
        self._since: float | None = None
        self._told: tuple[float, int] | None = None

    def __enter__(self) -> None:
        self._since = self._clock.now()

    def __exit__(self, *_: object) -> None:
        self._since = None

    @property
    def seconds(self) -> float:
        """Since the wait began; 0 where nothing is waited for."""
        since = self._since  # read once: the other thread may stop waiting at any time
        return 0.0 if since is None else self._clock.now() - since

    def due(self) -> float | None:
        """The seconds waited, once for every TOLD_EVERY of them; None in between."""
        since = self._since
        if since is None:
            return None
        seconds = self._clock.now() - since
        wait = (since, int(seconds / TOLD_EVERY))
        if seconds < TOLD_EVERY or wait == self._told:
            return None
        self._told = wait
        return seconds


def sentence(seconds: float, step: int, slowest: str) -> str:
    """What whoever waits is told; `slowest` is empty where all wait, or nobody else takes part."""
    nobody = "nobody else is behind: do all ranks call for the same collectives, or is the hub overloaded?"
    mend = "which computes, loads data or hangs: see its log, or its stack (py-spy dump --pid PID)"
    who = f"the slowest is {slowest}, {mend}" if slowest else nobody
    return f"waiting for {seconds:.0f} s at step {step}: {who}"

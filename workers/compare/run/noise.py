"""Noise: what other programs did on the machine during a run."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from hubring.workers.compare.run import machine

IDLE_LOAD = 0.5
"""Load per core before the first run above which the machine counts as busy."""
FOREIGN = 0.1
"""Share of processor time that other programs can use in a run without a warning."""

_STAT = Path("/proc/stat")
_IDLE = {3, 4}
"""Columns of idle time in its first line: idle, and idle while waiting for a disk."""


class Noise(Struct, frozen=True):
    """Noise of one run.

    Attributes:
        load: 1-minute load before and after; it includes our own programs of that minute.
        foreign: Share of the machine's time that other programs used; None if unknown.
    """

    load: tuple[float, float]
    foreign: float | None


class Sample(Struct, frozen=True):
    """Counts of one of our processes on its machine.

    Attributes:
        load: 1-minute load of the machine before and after.
        available: Processor seconds that the machine had.
        busy: Processor seconds in use; None if the system does not count them.
        own: Processor seconds of this process and of its children that have ended.
    """

    load: tuple[float, float]
    available: float
    busy: float | None
    own: float


class Listener:
    """Measures noise from its creation to a call of `noise`. Our programs must have ended by that call."""

    def __init__(self) -> None:
        self._load = os.getloadavg()[0]
        self._began, self._busy, self._own = time.monotonic(), _busy(), _own()

    def sample(self) -> Sample:
        """Returns the counts so far."""
        available = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        busy = _busy()
        busy = None if busy is None or self._busy is None else busy - self._busy
        return Sample((self._load, os.getloadavg()[0]), available, busy, _own() - self._own)

    def noise(self) -> Noise:
        """Returns the noise so far."""
        return of_machine([self.sample()])


def of_machine(samples: Sequence[Sample]) -> Noise:
    """Returns the noise of one machine; load and busy time are those of the first sample.

    Args:
        samples: From all our processes there that start programs, over the same time.
    """
    first = samples[0]
    if first.busy is None or first.available <= 0:
        return Noise(first.load, None)
    others = first.busy - sum(sample.own for sample in samples)
    return Noise(first.load, min(1.0, max(0.0, others / first.available)))


def is_idle() -> bool:
    """Whether the machine was idle in the last minute."""
    return os.getloadavg()[0] <= IDLE_LOAD * machine.cores()


def _busy() -> float | None:
    """Returns busy seconds of all processors since boot; None if the system does not count them."""
    if not _STAT.exists():
        return None
    ticks = [int(word) for word in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    busy = sum(count for column, count in enumerate(ticks) if column not in _IDLE)
    return busy / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    """Returns processor seconds of this process and of its children that have ended."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in spent)

"""Noise: what else the machine did while something was measured."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from hubring.workers.compare.run import machine

IDLE_LOAD = 0.5
"""Of the cores: with more of a load before the first run, the machine is called busy."""
FOREIGN = 0.1
"""Of the processors' time: what others may take during a run before that is told."""

_STAT = Path("/proc/stat")
_IDLE = {3, 4}
"""Columns of its first line that stand for rest: idle, and idle while waiting for a disk."""


class Noise(Struct, frozen=True):
    """What was heard during one run.

    Attributes:
        load: The machine's 1-minute load before and after; it holds what we ran in that minute ourselves.
        foreign: The part of the machine's time that went to nobody of ours; None where it cannot be told.
    """

    load: tuple[float, float]
    foreign: float | None


class Sample(Struct, frozen=True):
    """What one process of ours counted on its machine.

    Attributes:
        load: The machine's 1-minute load before and after.
        available: Seconds that the machine's processors had.
        busy: Seconds of these in which they worked; None where nobody counts.
        own: Seconds of these that this process took, with all that it started and that has ended.
    """

    load: tuple[float, float]
    available: float
    busy: float | None
    own: float


class Listener:
    """Listens from when it is made until it is asked; our programs have to have ended by then."""

    def __init__(self) -> None:
        self._load = os.getloadavg()[0]
        self._began, self._busy, self._own = time.monotonic(), _busy(), _own()

    def sample(self) -> Sample:
        """What was counted so far."""
        available = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        busy = _busy()
        busy = None if busy is None or self._busy is None else busy - self._busy
        return Sample((self._load, os.getloadavg()[0]), available, busy, _own() - self._own)

    def noise(self) -> Noise:
        """What was heard so far."""
        return of_machine([self.sample()])


def of_machine(samples: Sequence[Sample]) -> Noise:
    """What was heard on one machine, of which the first of our processes there tells.

    Args:
        samples: Those of all our processes there that start others, over the same time.
    """
    told = samples[0]
    if told.busy is None or told.available <= 0:
        return Noise(told.load, None)
    others = told.busy - sum(sample.own for sample in samples)
    return Noise(told.load, min(1.0, max(0.0, others / told.available)))


def is_idle() -> bool:
    """Whether the machine was at rest in the last minute."""
    return os.getloadavg()[0] <= IDLE_LOAD * machine.cores()


def _busy() -> float | None:
    """Seconds that all processors have worked since the machine started; None where nobody counts."""
    if not _STAT.exists():
        return None
    ticks = [int(word) for word in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    busy = sum(count for column, count in enumerate(ticks) if column not in _IDLE)
    return busy / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    """Processor seconds of this process and of all that it started and that have ended."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in spent)

"""Noise: what disturbed a run on its machine: other programs, the hypervisor, memory, the clock rate."""

from __future__ import annotations

import os
import re
import resource
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from msgspec import Struct

from hubring.workers.compare.run import machine

IDLE_LOAD = 0.5
"""Load per core before the first run above which the machine counts as busy."""
FOREIGN = 0.1
"""Share of processor time that other programs can use in a run without disturbing it."""
STOLEN = 0.02
"""Share of processor time that the hypervisor can give to other machines without disturbing a run."""
STALLED = 0.02
"""Share of a run in which some program can wait for memory without disturbing it."""
SLOWED = 0.95
"""Share of the fastest run's clock rate below which a run is disturbed."""
CLOCK_SECONDS = 1.0
"""Seconds between two readings of the processors' clock rates."""

_STAT = Path("/proc/stat")
_IDLE = {3, 4}
"""Columns of idle time in its first line: idle, and idle while waiting for a disk."""
_STOLEN = 7
"""Its column of the time in which the hypervisor ran another machine; it counts as busy too."""
_MEMORY = Path("/proc/pressure/memory")
_CPUINFO = Path("/proc/cpuinfo")


class Noise(Struct, frozen=True):
    """Noise of one run. A value is None if the system does not report it.

    Attributes:
        load: 1-minute load before and after; it includes our own programs of that minute.
        foreign: Share of the machine's time that other programs used, with `stolen`.
        stolen: Share of the machine's time that its hypervisor gave to other machines.
        stalled: Share of the run in which some program waited for memory.
        megahertz: Mean clock rate of the processors.
    """

    load: tuple[float, float]
    foreign: float | None
    stolen: float | None = None
    stalled: float | None = None
    megahertz: float | None = None

    def disturbance(self, fastest: float | None = None) -> str:
        """Returns what disturbed the run, as the start of a sentence; empty if nothing did.

        Args:
            fastest: The highest clock rate of any run, in MHz; None: not known.
        """
        if (self.stolen or 0.0) > STOLEN:
            return f"the hypervisor took {self.stolen:.0%} of the machine"
        if (self.foreign or 0.0) > FOREIGN:
            return f"other programs used {self.foreign:.0%} of the machine"
        if (self.stalled or 0.0) > STALLED:
            return f"programs waited for memory during {self.stalled:.0%} of the time"
        if self.megahertz and fastest and self.megahertz < SLOWED * fastest:
            return f"the processor ran at {self.megahertz / fastest:.0%} of its clock rate in other runs"
        return ""


class Sample(Struct, frozen=True):
    """Counts of one of our processes on its machine.

    Attributes:
        load: 1-minute load of the machine before and after.
        available: Processor seconds that the machine had.
        busy: Processor seconds in use; None if the system does not count them.
        own: Processor seconds of this process and of its children that have ended.
        seconds: Duration.
        stolen: Processor seconds that the hypervisor took.
        stalled: Seconds in which some program waited for memory.
        megahertz: Mean clock rate.
    """

    load: tuple[float, float]
    available: float
    busy: float | None
    own: float
    seconds: float = 0.0
    stolen: float | None = None
    stalled: float | None = None
    megahertz: float | None = None


class Listener:
    """Measures noise from its creation to a call of `noise`. Our programs must have ended by that call."""

    def __init__(self) -> None:
        self._load = os.getloadavg()[0]
        self._began, self._before, self._own = time.monotonic(), _counts(), _own()
        self._rates: list[float] = []
        self._ended = threading.Event()
        threading.Thread(target=self._watch_clock, name="clock rate", daemon=True).start()

    def sample(self) -> Sample:
        """Returns the counts so far, and ends the measurement."""
        self._ended.set()
        seconds, after = time.monotonic() - self._began, _counts()
        busy, stolen, stalled = (_growth(*pair) for pair in zip(self._before, after, strict=True))
        return Sample(
            load=(self._load, os.getloadavg()[0]),
            available=seconds * (os.cpu_count() or 1),
            busy=busy,
            own=_own() - self._own,
            seconds=seconds,
            stolen=stolen,
            stalled=stalled,
            megahertz=fmean(self._rates) if self._rates else None,
        )

    def noise(self) -> Noise:
        """Returns the noise so far, and ends the measurement."""
        return of_machine([self.sample()])

    def _watch_clock(self) -> None:
        while not self._ended.wait(CLOCK_SECONDS):
            if rates := _megahertz():
                self._rates.append(fmean(rates))


def of_machine(samples: Sequence[Sample]) -> Noise:
    """Returns the noise of one machine; load and busy time are those of the first sample.

    Args:
        samples: From all our processes there that start programs, over the same time.
    """
    first = samples[0]
    if first.available <= 0:
        return Noise(first.load, None)
    others = None if first.busy is None else first.busy - sum(sample.own for sample in samples)
    return Noise(
        load=first.load,
        foreign=_share(others, first.available),
        stolen=_share(first.stolen, first.available),
        stalled=_share(first.stalled, first.seconds),
        megahertz=first.megahertz,
    )


def _share(part: float | None, whole: float) -> float | None:
    return None if part is None or whole <= 0 else min(1.0, max(0.0, part / whole))


def is_idle() -> bool:
    """Whether the machine was idle in the last minute."""
    return os.getloadavg()[0] <= IDLE_LOAD * machine.cores()


def _counts() -> tuple[float | None, float | None, float | None]:
    """Returns busy and stolen seconds of all processors, and seconds of waiting for memory, since boot."""
    busy = stolen = stalled = None
    if _STAT.exists():
        ticks = [int(word) for word in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
        second = os.sysconf("SC_CLK_TCK")
        busy = sum(count for column, count in enumerate(ticks) if column not in _IDLE) / second
        stolen = ticks[_STOLEN] / second
    if found := re.search(r"^some .*total=(\d+)", _read(_MEMORY), re.MULTILINE):
        stalled = int(found[1]) / 1e6
    return busy, stolen, stalled


def _growth(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _megahertz() -> list[float]:
    return [float(rate) for rate in re.findall(r"^cpu MHz\s*: ([\d.]+)", _read(_CPUINFO), re.MULTILINE)]


def _read(file: Path) -> str:
    """Returns the text of a file of the kernel; empty if this kernel does not have it."""
    try:
        return file.read_text()
    except OSError:
        return ""


def _own() -> float:
    """Returns processor seconds of this process and of its children that have ended."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in spent)

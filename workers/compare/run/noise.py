"""Noise: what disturbed a run on its machine: other programs, the hypervisor, memory, the clock rate."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from msgspec import Struct

from hubring.ps.process.child import Child

FOREIGN = 0.1
"""Processor time that other programs can use without disturbing a run, relative to the run's own."""
FEWEST_CORES = 1.0
"""Every run counts as one that keeps so many cores busy, else all would disturb a run that sleeps."""
STOLEN = 0.02
"""Share of processor time that the hypervisor can give to other machines without disturbing a run."""
STALLED = 0.02
"""Share of a run in which some program can wait for memory without disturbing it."""
SLOWED = 0.95
"""Share of the clock rate in other runs of the same row and setting below which a run is disturbed."""
CLOCK_SECONDS = 1.0
"""Seconds between two readings of the processors' clock rates."""

_STAT = Path("/proc/stat")
_NOT_BUSY = {3, 4, 5, 6}
"""Columns of its lines that are no program's: idle, idle while waiting for a disk, and two of interrupts.
Most interrupts carry packets of the run's own programs, and no process is charged for them."""
_STOLEN = 7
"""Its column of the time in which the hypervisor ran another machine; it counts as busy too."""
_MEMORY = Path("/proc/pressure/memory")
_CPUINFO = Path("/proc/cpuinfo")


class RunNoise(Struct, frozen=True):
    """Noise of one run on one machine. A value is None if the system does not report it.

    Attributes:
        load: 1-minute load before and after; it includes our own programs of that minute.
        foreign: Share of the machine's time that other programs used, with `stolen`.
        stolen: Share of the machine's time that its hypervisor gave to other machines.
        stalled: Share of the run in which some program waited for memory.
        megahertz: Mean clock rate of the processors while they were busy.
        cores: Cores that the run kept busy on average, and cores that other programs kept busy.
        machine: Name of the machine on a cluster; else empty.
    """

    load: tuple[float, float]
    foreign: float | None
    stolen: float | None = None
    stalled: float | None = None
    megahertz: float | None = None
    cores: tuple[float, float] | None = None
    machine: str = ""

    def disturbance(self, fastest: float | None = None) -> str:
        """Returns what disturbed the run, as the start of a sentence; empty if nothing did.

        Args:
            fastest: The highest clock rate in runs of the same row and setting on this machine, in MHz. Those
                of other rows do not count, because a processor clocks by how many of its cores are busy.
                None: not known.
        """
        there = f" on {self.machine}" if self.machine else ""
        if (self.stolen or 0.0) > STOLEN:
            return f"the hypervisor took {self.stolen:.0%} of the machine{there}"
        if self.cores is not None and self.cores[1] > FOREIGN * max(FEWEST_CORES, self.cores[0]):
            return f"other programs used {self.cores[1]:.1f} cores and the run {self.cores[0]:.1f}{there}"
        if (self.stalled or 0.0) > STALLED:
            return f"programs waited for memory during {self.stalled:.0%} of the time{there}"
        if self.megahertz and fastest and self.megahertz < SLOWED * fastest:
            return f"the processor ran at {self.megahertz / fastest:.0%} of its rate in equal runs{there}"
        return ""


class ProcessCounts(Struct, frozen=True):
    """Counts of one of our processes on its machine.

    Attributes:
        load: 1-minute load of the machine before and after.
        available: Processor seconds that the machine had.
        busy: Processor seconds that programs used; None if the system does not count them.
        own: Processor seconds of this process and of its children that have ended.
        seconds: Duration.
        stolen: Processor seconds that the hypervisor took.
        stalled: Seconds in which some program waited for memory.
        megahertz: Mean clock rate of busy processors.
    """

    load: tuple[float, float]
    available: float
    busy: float | None
    own: float
    seconds: float = 0.0
    stolen: float | None = None
    stalled: float | None = None
    megahertz: float | None = None


class NoiseListener:
    """Measures noise from its creation to a call of `sample`. Our programs must have ended by that call.

    Args:
        parents: Children of this process that start programs too.
    """

    def __init__(self, parents: Sequence[Child] = ()) -> None:
        self._parents = parents
        self._load = os.getloadavg()[0]
        self._began, self._before, self._own = time.monotonic(), _counts(), _own(parents)
        self._clock = BusyClock(_busy_by_processor())
        self._ended = threading.Event()
        threading.Thread(target=self._watch_clock, name="clock rate", daemon=True).start()

    def sample(self) -> ProcessCounts:
        """Returns the counts so far, and ends the measurement."""
        self._ended.set()
        seconds, after = time.monotonic() - self._began, _counts()
        busy, stolen, stalled = (_growth(*pair) for pair in zip(self._before, after, strict=True))
        return ProcessCounts(
            load=(self._load, os.getloadavg()[0]),
            available=seconds * (os.cpu_count() or 1),
            busy=busy,
            own=_own(self._parents) - self._own,
            seconds=seconds,
            stolen=stolen,
            stalled=stalled,
            megahertz=self._clock.mean,
        )

    def _watch_clock(self) -> None:
        while not self._ended.wait(CLOCK_SECONDS):
            self._clock.read(_busy_by_processor(), _megahertz())


class BusyClock:
    """The mean clock rate of busy processors, so that idle ones with a lower rate do not count.

    Args:
        busy: The busy time of each processor so far, in any unit.
    """

    def __init__(self, busy: Mapping[int, float]) -> None:
        self._busy = busy
        self._weighed = self._weight = 0.0

    @property
    def mean(self) -> float | None:
        """The mean in MHz; None if no processor was busy, or the system does not report rates."""
        return self._weighed / self._weight if self._weight else None

    def read(self, busy: Mapping[int, float], rates: Mapping[int, float]) -> None:
        """Adds a reading of each processor's busy time and its clock rate in MHz."""
        for processor in busy.keys() & rates.keys() & self._busy.keys():
            spent = busy[processor] - self._busy[processor]
            self._weighed += spent * rates[processor]
            self._weight += spent
        self._busy = busy


def of_machine(samples: Sequence[ProcessCounts], name: str = "") -> RunNoise:
    """Returns the noise of one machine; load and busy time are those of the first sample.

    Args:
        samples: From all our processes there that start programs, over the same time.
        name: The machine's name on a cluster.
    """
    first = samples[0]
    if first.available <= 0:
        return RunNoise(first.load, None, machine=name)
    own = sum(sample.own for sample in samples)
    others = None if first.busy is None else max(0.0, first.busy - own)
    return RunNoise(
        load=first.load,
        foreign=_share(others, first.available),
        stolen=_share(first.stolen, first.available),
        stalled=_share(first.stalled, first.seconds),
        megahertz=first.megahertz,
        cores=None if others is None or not first.seconds else (own / first.seconds, others / first.seconds),
        machine=name,
    )


def _share(part: float | None, whole: float) -> float | None:
    return None if part is None or whole <= 0 else min(1.0, max(0.0, part / whole))


def _counts() -> tuple[float | None, float | None, float | None]:
    """Returns busy and stolen seconds of all processors, and seconds of waiting for memory, since boot."""
    busy = stolen = stalled = None
    if ticks := _ticks().get("cpu"):
        second = os.sysconf("SC_CLK_TCK")
        busy, stolen = _busy(ticks) / second, ticks[_STOLEN] / second
    if found := re.search(r"^some .*total=(\d+)", _read(_MEMORY), re.MULTILINE):
        stalled = int(found[1]) / 1e6
    return busy, stolen, stalled


def _growth(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _ticks() -> dict[str, list[int]]:
    """Returns the columns of `/proc/stat` for all processors, `cpu`, and for each, as `cpu0`."""
    lines = (line.split() for line in _read(_STAT).splitlines() if line.startswith("cpu"))
    return {name: [int(word) for word in words[:8]] for name, *words in lines}


def _busy(ticks: Sequence[int]) -> int:
    return sum(count for column, count in enumerate(ticks) if column not in _NOT_BUSY)


def _busy_by_processor() -> dict[int, float]:
    return {int(name[3:]): _busy(ticks) for name, ticks in _ticks().items() if name != "cpu"}


def _megahertz() -> dict[int, float]:
    """Returns the clock rate of each processor now; empty if the system does not report it."""
    found = re.findall(r"^processor\s*: (\d+)$(?s:.*?)^cpu MHz\s*: ([\d.]+)", _read(_CPUINFO), re.MULTILINE)
    return {int(processor): float(rate) for processor, rate in found}


def _read(file: Path) -> str:
    """Returns the text of a file of the kernel; empty if this kernel does not have it."""
    try:
        return file.read_text()
    except OSError:
        return ""


def _own(parents: Sequence[Child]) -> float:
    """Returns processor seconds of this process, of these, and of all their children that have ended."""
    pids = [os.getpid(), *(each.pid for each in parents if not each.ended)]
    return sum(sum(psutil.Process(pid).cpu_times()[:4]) for pid in pids)

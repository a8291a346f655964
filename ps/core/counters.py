"""What a process counts: bytes, pushes, rounds, time, and what it took of the machine."""

from __future__ import annotations

import re
import resource
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

RUNS_KEPT = 1000
"""Backup workers leave somebody out of every round: old runs make room for new ones."""


@dataclass(slots=True)
class Traffic:
    """What went over one process's wires so far: payload bytes, headers left out."""

    bytes_sent: int = 0
    bytes_received: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """How many of this process's pushes were applied at each staleness."""

    def clear(self) -> None:
        """Counts from here on; only while nothing is on its way."""
        self.bytes_sent = self.bytes_received = 0
        self.staleness.clear()


@dataclass(slots=True)
class Service:
    """What serving cost one shard since its job began, in nanoseconds.

    Attributes:
        queued: For how long requests waited for others that came off the wire with them.
        handled: For how long it read requests, updated and answered.
        held: By rank, for how long answers were held back until the mode let them go.
    """

    queued: int = 0
    handled: int = 0
    held: Counter[int] = field(default_factory=Counter)

    def clear(self) -> None:
        """Counts from here on."""
        self.queued = self.handled = 0
        self.held.clear()


@dataclass(slots=True)
class PartialRounds:
    """Consecutive rounds of one key with the same contributors.

    `first` and `last` are the versions that these rounds updated.
    """

    key: int
    first: int
    last: int
    ranks: tuple[int, ...]


@dataclass(slots=True)
class Stats:
    """What one shard counted since the job began.

    Attributes:
        pushes: Gradients that counted, or will when their round closes.
        duplicates: Pushes that were known already.
        dropped: Pushes too late for their round.
        keys: Slices that the shard holds.
        oldest: Lowest version of any key; 0 where there is none.
        newest: Highest version of any key, likewise.
        staleness: How many pushes were applied at each staleness.
        partial: Rounds that closed without all who began the job.
    """

    pushes: int = 0
    duplicates: int = 0
    dropped: int = 0
    keys: int = 0
    oldest: int = 0
    newest: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    partial: deque[PartialRounds] = field(default_factory=lambda: deque(maxlen=RUNS_KEPT))
    _latest: dict[int, PartialRounds] = field(default_factory=dict)

    def note_partial(self, key: int, version: int, ranks: tuple[int, ...]) -> None:
        """Records one round, in the last run of its key where it goes on."""
        run = self._latest.get(key)
        if run is not None and run.last == version - 1 and run.ranks == ranks:
            run.last = version
            return
        self._latest[key] = run = PartialRounds(key, version, version, ranks)
        self.partial.append(run)


_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)
"""proc(5). getrusage's ru_maxrss would not do: a program inherits it from whatever started it."""


class Usage(NamedTuple):
    """What this process took of the machine since it was started, all its threads together.

    Attributes:
        cpu_ns: Nanoseconds of cores, its own and the kernel's for it.
        peak_bytes: The most memory that it held at a time, memory shared with others included.
    """

    cpu_ns: int
    peak_bytes: int


def usage() -> Usage:
    """Up to now."""
    peak = _PEAK.search(Path("/proc/self/status").read_text())
    assert peak is not None, "Linux tells every process its peak"
    cpu = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(round((cpu.ru_utime + cpu.ru_stime) * 1e9), int(peak[1]) << 10)

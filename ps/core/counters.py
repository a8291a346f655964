"""Counters of a process: bytes, pushes, rounds, time, CPU and memory."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

MAX_RUNS = 1000
"""Runs of partial rounds to keep. In backup mode every round is partial; the oldest runs are dropped."""


@dataclass(slots=True)
class Traffic:
    """Payload bytes that a process sent and received, without headers."""

    bytes_sent: int = 0
    bytes_received: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of this process's pushes that were applied at each staleness."""

    def clear(self) -> None:
        """Resets the counters. Call it only while no message is in flight."""
        self.bytes_sent = self.bytes_received = 0
        self.staleness.clear()


@dataclass(slots=True)
class Service:
    """How one shard served requests since its job began; times are in nanoseconds.

    Attributes:
        queued: Time that requests waited for other requests received with them.
        handled: Time spent on reading requests, updating and answering.
        held: By rank, time that the mode held answers back.
        damaged: Number of messages that did not match their checksum.
    """

    queued: int = 0
    handled: int = 0
    held: Counter[int] = field(default_factory=Counter)
    damaged: int = 0

    def clear(self) -> None:
        """Resets the counters."""
        self.queued = self.handled = self.damaged = 0
        self.held.clear()


@dataclass(slots=True)
class PartialRounds:
    """Consecutive rounds of one key with the same contributors.

    `first` and `last` are the versions that the first and the last of these rounds updated.
    """

    key: int
    first: int
    last: int
    ranks: tuple[int, ...]


@dataclass(slots=True)
class Stats:
    """Counters of one shard since the job began.

    Attributes:
        pushes: Gradients that were counted, or that will be when their round closes.
        duplicates: Pushes that the shard had already received.
        dropped: Pushes that were too late for their round.
        keys: Slices that the shard holds.
        oldest: Lowest version of any key; 0 without keys.
        newest: Highest version of any key; 0 without keys.
        collectives: Rounds of collectives that closed.
        repeatable: Those in which a worker in a lost one's place can still take part.
        staleness: Number of pushes that were applied at each staleness.
        partial: Rounds that closed without some of the job's first members.
    """

    pushes: int = 0
    duplicates: int = 0
    dropped: int = 0
    keys: int = 0
    oldest: int = 0
    newest: int = 0
    collectives: int = 0
    repeatable: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    partial: deque[PartialRounds] = field(default_factory=lambda: deque(maxlen=MAX_RUNS))
    _latest: dict[int, PartialRounds] = field(default_factory=dict)

    def note_partial(self, key: int, version: int, ranks: tuple[int, ...]) -> None:
        """Records one round. Extends the key's last run if the round continues it."""
        run = self._latest.get(key)
        if run is not None and run.last == version - 1 and run.ranks == ranks:
            run.last = version
            return
        self._latest[key] = run = PartialRounds(key, version, version, ranks)
        self.partial.append(run)


_open_once = cache(os.open)
"""Keeps the file open, since a process without a free descriptor is asked for its usage, too."""

os.register_at_fork(after_in_child=_open_once.cache_clear)  # the file is about the process that opened it

_MEMORY = re.compile(rb"^Vm(?:HWM|RSS):\s+(\d+) kB$", re.MULTILINE)
"""Peak and current resident memory, see proc(5). A program inherits getrusage's ru_maxrss from its parent."""


class Usage(NamedTuple):
    """CPU time and memory of this process since it started, over all threads, without child processes.

    Attributes:
        cpu_ns: CPU time in user and kernel mode, in nanoseconds.
        peak_bytes: Peak resident memory, including shared memory.
        memory_bytes: Resident memory now.
        gpu_bytes: GPU memory that torch holds, on all GPUs; 0 if this process has not used a GPU.
    """

    cpu_ns: int
    peak_bytes: int
    memory_bytes: int
    gpu_bytes: int


def usage() -> Usage:
    """Returns the usage of this process."""
    status = _open_once("/proc/self/status", os.O_RDONLY)
    peak, memory = (int(size) << 10 for size in _MEMORY.findall(os.pread(status, 8192, 0)))
    cpu = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(round((cpu.ru_utime + cpu.ru_stime) * 1e9), peak, memory, sum(_gpu_memory().values()))


def gpu_use() -> float | None:
    """Returns the part of the last moments in which this process's GPUs computed, from 0 to 1.

    Other processes' work counts too. None without a GPU, without the package `nvidia-ml-py`, or where the GPU
    does not report it (MIG).
    """
    with suppress(Exception):  # errors of that package have no public class
        used = [sys.modules["torch.cuda"].utilization(index) for index, held in _gpu_memory().items() if held]
        return sum(used) / len(used) / 100 if used else None
    return None


def _gpu_memory() -> dict[int, int]:
    """Returns the bytes that torch holds on each GPU. Makes no CUDA context in a process that has none."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return {}
    return {index: cuda.memory_reserved(index) for index in range(cuda.device_count())}

"""Main memory: what is left of it, for this machine and for this process's control group."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from hubring.ps.doctor import cgroup
from hubring.ps.doctor.cgroup import Cgroup
from hubring.ps.doctor.finding import Finding, failure, ok, warning
from hubring.ps.doctor.sizes import GIB, MIB, spelt

NAME = "memory"

LEAST = 512 * MIB
"""A shard and one worker of a small job: each holds torch, some 200 MiB, before it holds a parameter."""

ENOUGH = 2 * GIB
"""For a hub and two workers of a job that is no toy."""

_LINE = re.compile(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", re.MULTILINE)


def judge(total: int, available: int, group: cgroup.Memory | None) -> Finding:
    """Whether a job finds room; all in bytes."""
    found = f"{spelt(available)} of {spelt(total)} available"
    mend = "stop what else runs here (ps aux --sort -rss), or take a machine with more"
    if group is not None and group.limit - group.used < available:
        available = max(0, group.limit - group.used)
        found = f"{spelt(available)} left of the {spelt(group.limit)} that the control group may have"
        mend = (
            "raise the limit: docker run --memory, Compose mem_limit, Kubernetes limits.memory, SLURM --mem"
        )
    if available < LEAST:
        return failure(NAME, f"{found}; a server and a worker take {spelt(LEAST)} before any model", mend)
    if available < ENOUGH:
        return warning(NAME, f"{found}: enough for a small job alone", mend)
    return ok(NAME, found)


def examine() -> Iterator[Finding]:
    """Reads /proc/meminfo and the control group."""
    kilobytes = {name: int(count) for name, count in _LINE.findall(Path("/proc/meminfo").read_text())}
    yield judge(kilobytes["MemTotal"] << 10, kilobytes["MemAvailable"] << 10, Cgroup().memory())

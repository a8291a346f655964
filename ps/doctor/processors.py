"""Cores: how many there are, on how many this process may run, and how much of their time it may use."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from hubring.ps.doctor.cgroup import Cgroup
from hubring.ps.doctor.finding import Finding, ok, warning

NAME = "cores"
THREADS = "OMP_NUM_THREADS"


def allowed(cgroup: Cgroup) -> float:
    """Cores' worth of time that this process may use."""
    here = float(len(os.sched_getaffinity(0)))
    quota = cgroup.cores()
    return here if quota is None else min(here, quota)


def judge(machine: int, here: int, quota: float | None, threads: str | None) -> Finding:
    """Whether programs will start as many threads as may run.

    Args:
        machine: Cores that it has.
        here: Those that this process may run on, which is what programs count.
        quota: Cores' worth of time that its control group may use; None: no limit.
        threads: What OMP_NUM_THREADS says, if it is set.
    """
    bound = f"{here} of the machine's {machine} may be used" if here < machine else f"{machine}"
    if quota is None or quota >= here:
        return ok(NAME, bound)
    found = f"{bound}, but the control group may use the time of {quota:.3g} only"
    if threads is not None:
        return ok(NAME, f"{found}; {THREADS}={threads} says how many threads start")
    least = max(1, int(quota))
    return warning(
        NAME,
        f"{found}: programs start {here} threads, which are then held up together",
        f"export {THREADS}={least} (divided by the workers here), or give the container whole cores:"
        f" docker run --cpuset-cpus 0-{least - 1}, Kubernetes' static CPU manager",
    )


def examine(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Counts cores."""
    here = len(os.sched_getaffinity(0))
    yield judge(os.cpu_count() or here, here, Cgroup().cores(), variables.get(THREADS))

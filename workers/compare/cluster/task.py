"""The task of this process among those that a launcher started, and what tasks cannot run."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.experiment.experiment import Experiment
from hubring.workers.launchers.placement import detect

ONE_MACHINE = {"mpi", "ray"}
"""Rows that start all of their workers on one machine."""


@dataclass(frozen=True, slots=True)
class Task:
    """One of several tasks.

    Attributes:
        rank: Its rank; 0 conducts.
        size: Number of tasks.
        local_rank: Its number on this machine.
        launcher: Name of the launcher.
        together: All tasks are known to be on one machine.
    """

    rank: int
    size: int
    local_rank: int
    launcher: str
    together: bool = False


def find(environment: Mapping[str, str], hostname: str | None = None) -> Task | None:
    """Returns the task of this process; None if no launcher started several.

    A rank in the hostname alone does not count: such a pod, for example of a StatefulSet, is one machine.

    Args:
        environment: The process's variables.
        hostname: This machine's hostname; None: look it up.

    Raises:
        ConfigError: Sources disagree.
        UsageError: A launcher sets the rank but not the number of tasks.
    """
    place = detect(environment, hostname=socket.gethostname() if hostname is None else hostname)
    if place.rank is None or place.size == 1:
        return None
    if place.size is None:
        if detect(environment).rank is None:
            return None
        raise UsageError(
            f"{', '.join(place.sources)} ({place.launcher}) sets the rank of this task, but the number of"
            " tasks is unknown; set WORLD_SIZE in every task, or run on this host with --alone"
        )
    together = place.local_size == place.size
    return Task(place.rank, place.size, place.local_rank, place.launcher, together)


def check(experiment: Experiment, task: Task, out: Path | None) -> Path:
    """Checks that a cluster's tasks can run this experiment; returns the folder to write to.

    Raises:
        UsageError: They cannot run it.
    """
    most = max(experiment.workers)
    if most > task.size:
        raise UsageError(
            f"the experiment has {most} workers, but {task.launcher} started {task.size} tasks, one for each"
            f" worker; start {most} tasks, or set at most {task.size} workers"
        )
    if out is None:
        raise UsageError(
            f"{task.launcher} started {task.size} tasks, which write to one folder; with --out, name a folder"
            " that all machines share"
        )
    if experiment.link is not None:
        raise UsageError(
            "[link] emulates links on one machine, but these tasks use real links; remove [link]"
            f" (--rate, --latency), or run without {task.launcher}"
        )
    if experiment.fault is not None:
        raise UsageError(
            "[fault] can kill only a worker on the conductor's machine;"
            f" remove [fault], or run without {task.launcher}"
        )
    if alone := ONE_MACHINE.intersection(experiment.rows):
        raise UsageError(
            f"rows = {', '.join(sorted(alone))} start all workers on one machine; remove them, or run"
            f" without {task.launcher}"
        )
    return out

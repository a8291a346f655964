"""The place of this process among those that a launcher started, and what cannot be had there."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.experiment.experiment import Experiment
from hubring.workers.launchers.placement import detect

ONE_MACHINE = {"mpi", "ray"}
"""Rows that start their workers themselves, here alone."""


@dataclass(frozen=True, slots=True)
class Task:
    """One of several.

    Attributes:
        rank: Which; 0 conducts.
        size: How many there are.
        local_rank: Which of this machine's.
        launcher: Who started them.
        together: All of them are known to be on one machine.
    """

    rank: int
    size: int
    local_rank: int
    launcher: str
    together: bool = False


def find(environment: Mapping[str, str], hostname: str | None = None) -> Task | None:
    """This process's place; None where nobody started several.

    A rank by the hostname alone is no word of a launcher: such a pod, as a StatefulSet's, is one machine.

    Args:
        environment: The process's variables.
        hostname: This machine's; None: asked of it.

    Raises:
        ConfigError: Sources disagree.
        UsageError: A launcher tells the rank, and nobody how many there are.
    """
    place = detect(environment, hostname=socket.gethostname() if hostname is None else hostname)
    if place.rank is None or place.size == 1:
        return None
    if place.size is None:
        if detect(environment).rank is None:
            return None
        raise UsageError(
            f"{', '.join(place.sources)} ({place.launcher}) tells which task this is, and nothing tells how"
            " many there are: set WORLD_SIZE to that number in every one of them, or run here with --alone"
        )
    together = place.local_size == place.size
    return Task(place.rank, place.size, place.local_rank, place.launcher, together)


def check(experiment: Experiment, task: Task, out: Path | None) -> Path:
    """Makes sure that tasks of a cluster can run this experiment; returns the folder to write to.

    Raises:
        UsageError: They cannot; says why, and the mend.
    """
    most = max(experiment.workers)
    if most > task.size:
        raise UsageError(
            f"the experiment has {most} workers, and {task.launcher} started {task.size} tasks, one for each:"
            f" start {most} tasks, or ask for at most {task.size} workers"
        )
    if out is None:
        raise UsageError(
            f"{task.launcher} started {task.size} tasks, which write to one folder: with --out, name one that"
            " all machines share"
        )
    if experiment.link is not None:
        raise UsageError(
            "[link] emulates links on one machine, and here are real ones: leave [link] (--rate, --latency)"
            f" out, or run without {task.launcher}"
        )
    if experiment.fault is not None:
        raise UsageError(
            "[fault] kills a worker of this machine at a step that it watches for:"
            f" leave [fault] out, or run without {task.launcher}"
        )
    if alone := ONE_MACHINE.intersection(experiment.rows):
        raise UsageError(
            f"rows = {', '.join(sorted(alone))} start all workers on one machine: leave them out, or run"
            f" without {task.launcher}"
        )
    return out

"""SLURM: the tasks of a step, which srun starts.

Reads SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID, SLURM_STEP_NUM_TASKS and SLURM_STEP_TASKS_PER_NODE. They
count only in a step: in a batch script, and in the shell of salloc, they describe the script or the shell.
"""

from __future__ import annotations

import re

from hubring.ps.core.errors import ConfigError
from hubring.workers.launchers import mpi
from hubring.workers.launchers.launcher_number import Environment, Family, Reading, read

_TASK = {
    "rank": "SLURM_PROCID",
    "local_rank": "SLURM_LOCALID",
    "node_rank": "SLURM_NODEID",
    "nodes": "SLURM_STEP_NUM_NODES",
    "restart": "SLURM_RESTART_COUNT",
}
_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_LAYOUT = "SLURM_STEP_TASKS_PER_NODE"
_FIRST_RESERVED = 0xFFFFFFF0
"""Step ids from this value on belong to batch scripts, interactive shells and the like."""


def _started(environment: Environment) -> bool:
    """Whether srun started this process."""
    step = environment.get("SLURM_STEP_ID", "")
    return bool(step) and not (step.isdecimal() and int(step) >= _FIRST_RESERVED)


def _read(environment: Environment) -> list[Reading]:
    tasks = next((name for name in _TASKS if name in environment), None)
    readings = read(environment, _TASK if tasks is None else {**_TASK, "size": tasks})
    if mpi.of_slurm(environment):
        readings += mpi.pmix(environment)
    layout = environment.get(_LAYOUT)
    node = next((reading.value for reading in readings if reading.field == "node_rank"), None)
    if layout is None or node is None:
        return readings
    return [*readings, Reading("local_size", _tasks_on(node, layout), f"{_LAYOUT}={layout}")]


def _tasks_on(node: int, layout: str) -> int:
    """Returns a node's number of tasks. `4(x2),3`: four tasks on each of two nodes, three on the third."""
    counts: list[int] = []
    for part in layout.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part, re.ASCII)
        if match is None:
            raise ConfigError(f"{_LAYOUT}={layout!r}: expected the form 4(x2),3; unset or correct {_LAYOUT}")
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise ConfigError(f"SLURM_NODEID={node}, but {_LAYOUT}={layout} lists {len(counts)} node(s)")
    return counts[node]


SLURM = Family("slurm", ("SLURM_STEP_ID", *_TASK.values(), *_TASKS, _LAYOUT), _started, _read)

"""Which rank am I? Read from the flags and from whatever started this process.

    torchrun   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK
    Open MPI   OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    SLURM      SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_NODEID, of a step (srun) alone:
               in a batch script they speak of the script itself

The law: sources agree or the worker does not start. One exception: a launcher
that runs inside another, which its own variables betray, counts alone: torchrun
under srun or mpirun, and mpirun in a SLURM job, whose daemons are srun's tasks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from ps.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Placement:
    """Where this worker stands.

    Attributes:
        rank: Among all workers; None lets the server choose.
        size: How many workers there are; None leaves it to the server.
        local_rank: Among the workers on this host, as far as is known: 0 otherwise.
        local_size: How many workers this host has, as far as is known: 1 otherwise.
        node_rank: Which of the hosts this is.
        launcher: `torchrun`, `openmpi`, `slurm`, `environment` for bare RANK variables, or `shell`.
        sources: What was read, as `NAME=value`.
    """

    rank: int | None = None
    size: int | None = None
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    launcher: str = "shell"
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Reading:
    """One number and where it stood."""

    field: str
    value: int
    source: str


_TORCH = {
    "rank": "RANK",
    "size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_size": "LOCAL_WORLD_SIZE",
    "node_rank": "GROUP_RANK",
}
_OPEN_MPI = {
    "rank": "OMPI_COMM_WORLD_RANK",
    "size": "OMPI_COMM_WORLD_SIZE",
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
_SLURM = {"rank": "SLURM_PROCID", "local_rank": "SLURM_LOCALID", "node_rank": "SLURM_NODEID"}


def detect(
    environment: Mapping[str, str],
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
) -> Placement:
    """Finds this worker's place.

    Args:
        environment: The process's variables.
        rank: From `--rank`; None where it was not given.
        world_size: From `--world-size`.
        local_rank: From `--local-rank`.

    Raises:
        ConfigError: Two sources disagree, or a number cannot be; names source and value.
    """
    launcher, readings = _launcher(environment)
    flags = {"rank": ("--rank", rank), "size": ("--world-size", world_size)}
    flags["local_rank"] = ("--local-rank", local_rank)
    given = [
        _Reading(field, value, f"{flag} {value}")
        for field, (flag, value) in flags.items()
        if value is not None
    ]
    readings = [*given, *readings]
    _check_agreement(readings)
    placement = _placement(launcher, readings)
    _check_ranges(readings)
    return placement


def _launcher(environment: Mapping[str, str]) -> tuple[str, list[_Reading]]:
    """The launcher's name and what it says; the innermost one's alone."""
    torch = _read(environment, _TORCH)
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun", torch
    if "OMPI_COMM_WORLD_RANK" in environment:
        return "openmpi", [*torch, *_read(environment, _OPEN_MPI)]
    if "SLURM_STEP_ID" in environment:
        return "slurm", [*torch, *_read_slurm(environment)]
    return ("environment" if torch else "shell"), torch


def _read(environment: Mapping[str, str], names: Mapping[str, str]) -> list[_Reading]:
    return [
        _Reading(field, _number(name, environment[name]), f"{name}={environment[name]}")
        for field, name in names.items()
        if name in environment
    ]


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"\s*\d+\s*", text, re.ASCII):
        raise ConfigError(f"{name}={text!r} is no whole number of 0 or more; unset it or correct it")
    return int(text)


def _read_slurm(environment: Mapping[str, str]) -> list[_Reading]:
    tasks = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environment), None)
    readings = _read(environment, _SLURM if tasks is None else {**_SLURM, "size": tasks})
    layout = environment.get("SLURM_STEP_TASKS_PER_NODE")
    node = next((reading.value for reading in readings if reading.field == "node_rank"), None)
    if layout is None or node is None:
        return readings
    local_size = _tasks_on(node, layout)
    return [*readings, _Reading("local_size", local_size, f"SLURM_STEP_TASKS_PER_NODE={layout}")]


def _tasks_on(node: int, layout: str) -> int:
    """Reads SLURM's `4(x2),3`: four tasks on each of two nodes, three on the next."""
    counts: list[int] = []
    for part in layout.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part, re.ASCII)
        if match is None:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={layout!r} is not of the form 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise ConfigError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE={layout} has no such node")
    return counts[node]


def _check_agreement(readings: list[_Reading]) -> None:
    for one, other in combinations(readings, 2):
        if one.field == other.field and one.value != other.value:
            raise ConfigError(
                f"two sources disagree on the {_spell(one.field)}: {one.source} and {other.source}; "
                "unset one of them"
            )


def _placement(launcher: str, readings: list[_Reading]) -> Placement:
    found = {reading.field: reading.value for reading in readings}
    rank, local_size = found.get("rank"), found.get("local_size", 1)
    return Placement(
        rank=rank,
        size=found.get("size"),
        local_rank=found.get("local_rank", 0),
        local_size=local_size,
        # Open MPI does not say; it, like the others by default, fills one host after the other.
        node_rank=found.get("node_rank", (rank or 0) // max(1, local_size)),
        launcher=launcher,
        sources=tuple(reading.source for reading in readings),
    )


def _check_ranges(readings: list[_Reading]) -> None:
    for field, limit in (("rank", "size"), ("local_rank", "local_size")):
        low = _find(readings, field)
        high = _find(readings, limit)
        if high is not None and high.value < 1:
            raise ConfigError(f"the {_spell(limit)} is {high.value} ({high.source}); it must be at least 1")
        if low is not None and low.value < 0:
            raise ConfigError(f"the {_spell(field)} is {low.value} ({low.source}); it must be at least 0")
        if low is not None and high is not None and low.value >= high.value:
            raise ConfigError(
                f"the {_spell(field)} is {low.value} ({low.source}), but the {_spell(limit)} is "
                f"{high.value} ({high.source}); it must be 0 to {high.value - 1}"
            )


def _find(readings: list[_Reading], field: str) -> _Reading | None:
    return next((reading for reading in readings if reading.field == field), None)


def _spell(field: str) -> str:
    return {"size": "world size", "local_size": "number of local workers"}.get(field, field.replace("_", " "))

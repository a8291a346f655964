"""Finds this worker's rank and sizes from flags and from the launcher's variables.

The rule: all sources agree, or the worker does not start. One exception: if a launcher runs inside another
launcher, only the variables of the inner one count. Examples are torchrun under srun or mpirun, and mpirun
in a SLURM job, where srun starts mpirun's daemons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from hubring.ps.core.errors import ConfigError
from hubring.workers.launchers.known_launchers import (
    HUBRING,
    KUBERNETES,
    LAUNCHER_VARIABLE,
    MPICH,
    OPEN_MPI,
    PMIX,
    SLURM,
    TORCHRUN,
    Environment,
    LauncherFamily,
    LauncherNumber,
    pod_number,
    rank_variables,
)

FAMILIES: tuple[LauncherFamily, ...] = (HUBRING, TORCHRUN, OPEN_MPI, MPICH, PMIX, SLURM, KUBERNETES)
"""Innermost launcher first."""


@dataclass(frozen=True, slots=True)
class Placement:
    """This worker's rank and sizes.

    Attributes:
        rank: Among all workers; None: the server assigns it.
        size: Number of workers; None: the server knows it.
        local_rank: Among the workers on this host; 0 if unknown.
        local_size: Number of workers on this host; 1 if unknown.
        node_rank: Index of this host among all hosts.
        nodes: Number of hosts; None if unknown.
        restart: How often the launcher has restarted this job.
        launcher: A family's name, `ps-worker`, `ps-run` or `hubring.launch`, `environment` for RANK variables
            without a known launcher, or `shell`.
        readings: The numbers that were read.
    """

    rank: int | None = None
    size: int | None = None
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    nodes: int | None = None
    restart: int = 0
    launcher: str = "shell"
    readings: tuple[LauncherNumber, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of all numbers, as `NAME=value`."""
        return tuple(reading.source for reading in self.readings)

    @property
    def ends_together(self) -> bool:
        """Whether the launcher stops all workers when it stops one, so that a pre-emption ends the job."""
        return self.launcher in ("torchrun", "openmpi", "mpich", "pmix", "slurm", "ps-worker", "ps-run")


def detect(
    environment: Environment,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    hostname: str = "",
) -> Placement:
    """Finds this worker's rank and sizes.

    Args:
        environment: The process's environment variables.
        rank: The value of `--rank`; None if not set.
        world_size: The value of `--world-size`; None if not set.
        local_rank: The value of `--local-rank`; None if not set.
        hostname: This host's name; in a pod it can end in the pod's number.

    Raises:
        ConfigError: Two sources disagree, or a number is invalid. The message names source and value.
    """
    launcher, readings = _launcher(environment)
    readings = [*_given(rank, world_size, local_rank), *readings]
    if not any(reading.field == "rank" for reading in readings):
        number = pod_number(environment, hostname)
        if number is not None:
            launcher, readings = KUBERNETES.name, [*readings, number]
    _check_agreement(readings)
    _check_ranges(readings)
    return _placement(launcher, readings)


def set_aside(environment: Environment) -> tuple[str, ...]:
    """Returns the values of outer launchers, which are ignored."""
    outer = [family for family in FAMILIES if family.started(environment)][1:]
    found = [reading.source for family in outer for reading in family.read(environment)]
    return tuple(source for source in dict.fromkeys(found) if source not in detect(environment).sources)


def absent(environment: Environment) -> Mapping[str, tuple[str, ...]]:
    """Returns the variables that are not set, by family."""
    return {
        family.name: tuple(name for name in family.names if name not in environment)
        for family in FAMILIES
        if any(name not in environment for name in family.names)
    }


def _given(rank: int | None, world_size: int | None, local_rank: int | None) -> list[LauncherNumber]:
    flags = (("rank", "--rank", rank), ("size", "--world-size", world_size))
    return [
        LauncherNumber(field, value, f"{flag} {value}")
        for field, flag, value in (*flags, ("local_rank", "--local-rank", local_rank))
        if value is not None
    ]


def _launcher(environment: Environment) -> tuple[str, list[LauncherNumber]]:
    """Returns the innermost launcher's name and numbers, with those of the RANK variables."""
    for family in FAMILIES:
        if family.started(environment):
            name = environment[LAUNCHER_VARIABLE] if family is HUBRING else family.name
            found = family.read(environment)
            return name, found if family in (HUBRING, TORCHRUN) else [*rank_variables(environment), *found]
    found = rank_variables(environment)
    return ("environment" if found else "shell"), found


def _check_agreement(readings: Sequence[LauncherNumber]) -> None:
    for one, other in combinations(readings, 2):
        if one.field == other.field and one.value != other.value:
            raise ConfigError(
                f"two sources disagree on the {spell(one.field)}: {one.source} and {other.source};"
                " unset one of them"
            )


def _placement(launcher: str, readings: Sequence[LauncherNumber]) -> Placement:
    found: dict[str, Any] = {reading.field: reading.value for reading in readings}
    # Open MPI sets no node rank. By default it fills one host after another, like the other launchers.
    found.setdefault("node_rank", found.get("rank", 0) // max(1, found.get("local_size", 1)))
    return Placement(**found, launcher=launcher, readings=tuple(readings))


def _check_ranges(readings: Sequence[LauncherNumber]) -> None:
    found = {reading.field: reading for reading in reversed(readings)}
    for field, limit in (("rank", "size"), ("local_rank", "local_size")):
        low, high = found.get(field), found.get(limit)
        if high is not None and high.value < 1:
            raise ConfigError(f"the {spell(limit)} is {high.value} ({high.source}); it must be at least 1")
        if low is not None and low.value < 0:
            raise ConfigError(f"the {spell(field)} is {low.value} ({low.source}); it must be at least 0")
        if low is not None and high is not None and low.value >= high.value:
            raise ConfigError(
                f"the {spell(field)} is {low.value} ({low.source}), but the {spell(limit)} is "
                f"{high.value} ({high.source}); it must be 0 to {high.value - 1}"
            )


def spell(field: str) -> str:
    """Returns a field's name as words for a message."""
    return {"size": "world size", "local_size": "number of local workers"}.get(field, field.replace("_", " "))

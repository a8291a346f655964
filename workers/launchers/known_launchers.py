"""The launchers that start workers, and the numbers that each puts into environment variables.

Hubring's own launchers set HUBRING_LAUNCHER, `ps-worker`, `ps-run` or `hubring.launch`, and the variables of
torchrun.
HOROVOD_* variables count only under `ps-run`, and must agree with RANK and the others. RANK and the like
without a launcher's variable are set by hand, or by an operator such as Kubeflow's. torchrun sets
TORCHELASTIC_RUN_ID.

Kubernetes and Compose run one worker per container. A pod of an indexed Job, or of a JobSet of one
indexed Job, has JOB_COMPLETION_INDEX. If no other source gives the rank, a pod's hostname gives it if it
ends in a number, for example `train-3` of a StatefulSet. The number can have up to four digits, since
random suffixes have five characters. No variable holds the number of pods, so the server supplies it. The
number of a Compose replica is only in a label outside the container, so the hub assigns its rank.

Open MPI sets OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE; PMIX_RANK must agree. PMIx alone
sets only PMIX_RANK: the number of processes is available through the PMIx library, but not in a variable.
A namespace that begins with `slurm.` belongs to srun, and SLURM's own variables hold more. Hydra, the
mpiexec of MPICH and Intel MPI, sets PMI_RANK, PMI_SIZE, MPI_LOCALRANKID and MPI_LOCALNRANKS. srun
--mpi=pmi2 sets only the first two.

SLURM's variables count only in a step, which srun starts: in a batch script, and in the shell of salloc,
they describe the script or the shell.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from hubring.ps.core.errors import ConfigError

Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LauncherNumber:
    """One number and its source.

    Attributes:
        field: A field of `Placement`: rank, size, local_rank, local_size, node_rank, nodes or restart.
        value: The number.
        source: `NAME=value`, the flag and its value, or the hostname.
    """

    field: str
    value: int
    source: str


@dataclass(frozen=True, slots=True)
class LauncherFamily:
    """Launchers that set the same variables.

    Attributes:
        name: The value of `Placement.launcher`.
        started: Whether the variables show that this family started the process.
        read: Returns the numbers in the variables.
        names: Every variable that the family reads.
        note: What the family does not provide, for `ps-worker env --explain`.
    """

    name: str
    started: Callable[[Environment], bool]
    read: Callable[[Environment], list[LauncherNumber]]
    names: tuple[str, ...]
    note: str = ""


def read_numbers(environment: Environment, names: Mapping[str, str]) -> list[LauncherNumber]:
    """Returns the numbers in these variables (field to variable name), without those that are not set.

    Raises:
        ConfigError: A variable holds no number.
    """
    return [
        LauncherNumber(field, parse_number(name, environment[name]), f"{name}={environment[name]}")
        for field, name in names.items()
        if name in environment
    ]


def parse_number(name: str, text: str) -> int:
    """Parses a whole number of 0 or more.

    Raises:
        ConfigError: The text is not such a number.
    """
    if not re.fullmatch(r"\s*\d+\s*", text, re.ASCII):
        raise ConfigError(f"{name}={text!r}: expected a whole number of 0 or more; unset or correct {name}")
    return int(text)


def _sets(name: str) -> Callable[[Environment], bool]:
    """Returns whether a variable is set, as a function of the environment."""
    return lambda environment: name in environment


def _reads(*variables: Mapping[str, str]) -> Callable[[Environment], list[LauncherNumber]]:
    """Returns the numbers in these variables, as a function of the environment."""
    return lambda environment: [number for names in variables for number in read_numbers(environment, names)]


PROGRESS_VARIABLE = "HUBRING_PROGRESS"
"""Environment variable with the file for rank 0's progress line."""
LAUNCHER_VARIABLE = "HUBRING_LAUNCHER"


def _fields(*names: str) -> dict[str, str]:
    """Returns the variables of rank, size, local rank, local size and node rank, or of the first of them."""
    return dict(zip(("rank", "size", "local_rank", "local_size", "node_rank"), names, strict=False))


RANK_VARIABLES = _fields("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
HOROVOD_VARIABLES = _fields(
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK")
)


def place_variables(rank: int, size: int, local_rank: int, local_size: int, node_rank: int) -> dict[str, str]:
    """Returns the variables that give a worker its rank and sizes, as torchrun sets them."""
    place = rank, size, local_rank, local_size, node_rank
    return dict(zip(RANK_VARIABLES.values(), map(str, place), strict=True))


@contextmanager
def meeting_variables(environment: Environment) -> Iterator[dict[str, str]]:
    """Yields where the ranks of one host meet for a `torch.distributed` group of the script.

    Only what the environment does not give; that of a worker, which starts another job, gives nothing. Until
    the end of the block the port is taken by a socket that does not listen, so that no other program gets it,
    and rank 0 can listen there (SO_REUSEADDR).
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1])}
        given = {} if LAUNCHER_VARIABLE in environment else environment
        yield {name: text for name, text in here.items() if name not in given}


rank_variables = _reads(RANK_VARIABLES)
"""Returns the numbers in RANK and the like, whatever set them."""


def _ours(environment: Environment) -> list[LauncherNumber]:
    if environment[LAUNCHER_VARIABLE] == "ps-run":
        return [*rank_variables(environment), *read_numbers(environment, HOROVOD_VARIABLES)]
    return rank_variables(environment)


_RESTART = {"restart": "TORCHELASTIC_RESTART_COUNT"}

HUBRING = LauncherFamily(
    "ours", _sets(LAUNCHER_VARIABLE), _ours, (LAUNCHER_VARIABLE, *HOROVOD_VARIABLES.values())
)
TORCHRUN = LauncherFamily(
    "torchrun",
    _sets("TORCHELASTIC_RUN_ID"),
    _reads(RANK_VARIABLES, _RESTART),
    ("TORCHELASTIC_RUN_ID", *RANK_VARIABLES.values(), *_RESTART.values()),
)


_INDEX = "JOB_COMPLETION_INDEX"
_IN_A_POD = "KUBERNETES_SERVICE_HOST"
_ORDINAL = re.compile(r".+-(0|[1-9]\d{0,3})", re.ASCII)


def pod_number(environment: Environment, hostname: str) -> LauncherNumber | None:
    """Returns the number at the end of a pod's hostname; None without one, and outside Kubernetes."""
    match = _ORDINAL.fullmatch(hostname.partition(".")[0])
    if match is None or _IN_A_POD not in environment:
        return None
    return LauncherNumber("rank", int(match[1]), f"hostname {hostname}")


KUBERNETES = LauncherFamily(
    "kubernetes",
    _sets(_INDEX),
    _reads({"rank": _INDEX}),
    (_INDEX, _IN_A_POD),
    "Kubernetes gives a pod only its index; set --world-size, or ps-server start --workers",
)


_OPEN_MPI = _fields(
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
_PMIX = {"rank": "PMIX_RANK"}
_HYDRA = _fields("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def speaks_pmix(environment: Environment) -> bool:
    """Whether a PMIx daemon other than SLURM's started this process."""
    return "PMIX_RANK" in environment and not of_slurm(environment)


def of_slurm(environment: Environment) -> bool:
    """Whether srun set the PMIx variables."""
    namespace = environment.get("PMIX_NAMESPACE", "")
    return namespace.startswith("slurm.") or (not namespace and "SLURM_STEP_ID" in environment)


def _by_hydra(given: Environment) -> bool:
    return "PMI_RANK" in given and ("MPI_LOCALRANKID" in given or "SLURM_STEP_ID" not in given)


OPEN_MPI = LauncherFamily(
    "openmpi", _sets("OMPI_COMM_WORLD_RANK"), _reads(_OPEN_MPI, _PMIX), tuple(_OPEN_MPI.values())
)
MPICH = LauncherFamily("mpich", _by_hydra, _reads(_HYDRA), tuple(_HYDRA.values()))
PMIX = LauncherFamily(
    "pmix",
    speaks_pmix,
    _reads(_PMIX),
    ("PMIX_RANK", "PMIX_NAMESPACE"),
    "PMIx sets a variable only for the rank; set --world-size, or ps-server start --workers",
)


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


def _by_srun(environment: Environment) -> bool:
    """Whether srun started this process."""
    step = environment.get("SLURM_STEP_ID", "")
    return bool(step) and not (step.isdecimal() and int(step) >= _FIRST_RESERVED)


def _slurm(environment: Environment) -> list[LauncherNumber]:
    tasks = next((name for name in _TASKS if name in environment), None)
    readings = read_numbers(environment, _TASK if tasks is None else {**_TASK, "size": tasks})
    if of_slurm(environment):
        readings += read_numbers(environment, _PMIX)
    layout = environment.get(_LAYOUT)
    node = next((reading.value for reading in readings if reading.field == "node_rank"), None)
    if layout is None or node is None:
        return readings
    return [*readings, LauncherNumber("local_size", _tasks_on(node, layout), f"{_LAYOUT}={layout}")]


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


SLURM = LauncherFamily("slurm", _by_srun, _slurm, ("SLURM_STEP_ID", *_TASK.values(), *_TASKS, _LAYOUT))

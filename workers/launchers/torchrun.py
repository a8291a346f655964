"""torchrun, Hubring's own launchers, which set the same variables, and RANK variables of unknown origin.

torchrun sets TORCHELASTIC_RUN_ID. HUBRING_LAUNCHER names one of Hubring's launchers: `ps-worker --gpus N` or
`ps-run`. HOROVOD_* variables count only under `ps-run`, and must agree with RANK and the others. RANK and the
like without a launcher's variable are set by hand, or by an operator such as Kubeflow's.
"""

from __future__ import annotations

from hubring.workers.launchers.launcher_number import Environment, Family, Reading, read

OURS = "HUBRING_LAUNCHER"

VARIABLES = {
    "rank": "RANK",
    "size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_size": "LOCAL_WORLD_SIZE",
    "node_rank": "GROUP_RANK",
}
HOROVOD = {
    "rank": "HOROVOD_RANK",
    "size": "HOROVOD_SIZE",
    "local_rank": "HOROVOD_LOCAL_RANK",
    "local_size": "HOROVOD_LOCAL_SIZE",
    "node_rank": "HOROVOD_CROSS_RANK",
}


def place_variables(rank: int, size: int, local_rank: int, local_size: int, node_rank: int) -> dict[str, str]:
    """Returns the variables that give a worker its rank and sizes, as torchrun sets them."""
    place = {"rank": rank, "size": size, "local_rank": local_rank, "local_size": local_size}
    return {VARIABLES[name]: str(value) for name, value in {**place, "node_rank": node_rank}.items()}


def bare(environment: Environment) -> list[Reading]:
    """Returns the numbers in RANK and the like, whatever set them."""
    return read(environment, VARIABLES)


def _torchrun(environment: Environment) -> list[Reading]:
    return [*bare(environment), *read(environment, {"restart": "TORCHELASTIC_RESTART_COUNT"})]


def _ours(environment: Environment) -> list[Reading]:
    if environment[OURS] == "ps-run":
        return [*bare(environment), *read(environment, HOROVOD)]
    return bare(environment)


OWN = Family(
    "ours",
    (OURS, *HOROVOD.values()),
    lambda environment: OURS in environment,
    _ours,
)
TORCHRUN = Family(
    "torchrun",
    ("TORCHELASTIC_RUN_ID", *VARIABLES.values(), "TORCHELASTIC_RESTART_COUNT"),
    lambda environment: "TORCHELASTIC_RUN_ID" in environment,
    _torchrun,
)

"""torchrun, the launchers of ours that spell things as it does, and bare variables.

TORCHELASTIC_RUN_ID betrays torchrun. HUBRING_LAUNCHER names one of ours: `ps-worker --gpus N`, or `ps-run`,
which may say the same in Horovod's words too; HOROVOD_* that anybody else has set say nothing to us. Bare
RANK and the like are set by hand, or by an operator such as Kubeflow's.
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


def told(rank: int, size: int, local_rank: int, local_size: int, node_rank: int) -> dict[str, str]:
    """The variables that tell a worker its place, as torchrun would."""
    place = {"rank": rank, "size": size, "local_rank": local_rank, "local_size": local_size}
    return {VARIABLES[name]: str(value) for name, value in {**place, "node_rank": node_rank}.items()}


def bare(environment: Environment) -> list[Reading]:
    """What variables of torch's names say, whoever set them."""
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

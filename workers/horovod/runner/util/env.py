"""Rank and size from the variables of a launcher, and which variables to pass on."""

from __future__ import annotations

import re

from hubring.ps.config.environment import environment
from hubring.workers.horovod.runner.util.secret import HOROVOD_SECRET_KEY

__all__ = ["IGNORE_REGEXES", "LOG_LEVEL_STR", "get_env_rank_and_size", "is_exportable", "is_kubeflow_mpi"]

LOG_LEVEL_STR = ["FATAL", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE"]
IGNORE_REGEXES = {"BASH_FUNC_.*", "OLDPWD", ".*CUDA_VISIBLE_DEVICES", HOROVOD_SECRET_KEY}
"""Patterns of variables that belong to one process."""

LAUNCHERS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
KUBEFLOW_AGENT = "/etc/mpi/kubexec.sh"


def is_exportable(v: str) -> bool:
    """Whether to pass the variable with this name to workers on other hosts."""
    return not any(re.match(pattern, v) for pattern in IGNORE_REGEXES)


def get_env_rank_and_size() -> tuple[int, int]:
    """Returns rank and size from the environment; (0, 1) without a launcher.

    Raises:
        RuntimeError: A launcher's rank is set and its size is not, or the reverse.
    """
    variables = environment()
    for names in LAUNCHERS:
        found = {name: variables[name] for name in names if name in variables}
        if len(found) == 1:
            raise RuntimeError(f"{found} is set, but only one of {' and '.join(names)}; set both or neither")
        if found:
            rank, size = found.values()
            return int(rank), int(size)
    return 0, 1


def is_kubeflow_mpi() -> bool:
    """Whether Kubeflow's MPI operator starts the processes."""
    return environment().get("OMPI_MCA_plm_rsh_agent") == KUBEFLOW_AGENT

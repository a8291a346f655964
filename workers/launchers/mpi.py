"""Open MPI, MPICH and its kin, and others whose daemons speak PMIx.

Open MPI says OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE, and PMIX_RANK must agree. Of PMIx
alone PMIX_RANK is all there is: the number of processes is asked for through the library, and stands in no
variable. A namespace that begins with `slurm.` is srun's, which says more itself.

Hydra, the mpiexec of MPICH and Intel MPI, says PMI_RANK, PMI_SIZE, MPI_LOCALRANKID and MPI_LOCALNRANKS. srun
--mpi=pmi2 says the first two as well, and never the others.
"""

from __future__ import annotations

from hubring.workers.launchers.launcher_number import Environment, Family, Reading, read

_OPEN_MPI = {
    "rank": "OMPI_COMM_WORLD_RANK",
    "size": "OMPI_COMM_WORLD_SIZE",
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
_PMIX = {"rank": "PMIX_RANK"}
_HYDRA = {
    "rank": "PMI_RANK",
    "size": "PMI_SIZE",
    "local_rank": "MPI_LOCALRANKID",
    "local_size": "MPI_LOCALNRANKS",
}


def _open_mpi(environment: Environment) -> list[Reading]:
    return [*read(environment, _OPEN_MPI), *read(environment, _PMIX)]


def speaks_pmix(environment: Environment) -> bool:
    """Whether a PMIx daemon other than SLURM's started this process."""
    return "PMIX_RANK" in environment and not of_slurm(environment)


def of_slurm(environment: Environment) -> bool:
    """Whether what is said in PMIx's variables was said by srun."""
    namespace = environment.get("PMIX_NAMESPACE", "")
    return namespace.startswith("slurm.") or (not namespace and "SLURM_STEP_ID" in environment)


def pmix(environment: Environment) -> list[Reading]:
    """What a PMIx daemon says."""
    return read(environment, _PMIX)


def _by_hydra(environment: Environment) -> bool:
    return "PMI_RANK" in environment and (
        "MPI_LOCALRANKID" in environment or "SLURM_STEP_ID" not in environment
    )


def _hydra(environment: Environment) -> list[Reading]:
    return read(environment, _HYDRA)


OPEN_MPI = Family(
    "openmpi",
    tuple(_OPEN_MPI.values()),
    lambda environment: "OMPI_COMM_WORLD_RANK" in environment,
    _open_mpi,
)
MPICH = Family("mpich", tuple(_HYDRA.values()), _by_hydra, _hydra)
PMIX = Family(
    "pmix",
    ("PMIX_RANK", "PMIX_NAMESPACE"),
    speaks_pmix,
    pmix,
    "PMIx puts the rank alone into a variable: give --world-size, or ps-server start --workers",
)

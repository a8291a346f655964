"""Open MPI, MPICH and its derivatives, and other launchers that use PMIx.

Open MPI sets OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE; PMIX_RANK must agree. PMIx alone sets
only PMIX_RANK: the number of processes is available through the PMIx library, but not in a variable. A
namespace that begins with `slurm.` belongs to srun, and SLURM's own variables hold more.

Hydra, the mpiexec of MPICH and Intel MPI, sets PMI_RANK, PMI_SIZE, MPI_LOCALRANKID and MPI_LOCALNRANKS. srun
--mpi=pmi2 sets only the first two.
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
    """Whether srun set the PMIx variables."""
    namespace = environment.get("PMIX_NAMESPACE", "")
    return namespace.startswith("slurm.") or (not namespace and "SLURM_STEP_ID" in environment)


def pmix(environment: Environment) -> list[Reading]:
    """Returns the numbers that a PMIx daemon sets."""
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
    "PMIx sets a variable only for the rank; set --world-size, or ps-server start --workers",
)

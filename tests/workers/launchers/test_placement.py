from __future__ import annotations

import os
import socket
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hubring.ps.core.errors import ConfigError
from hubring.workers.launchers.known_launchers import meeting_variables
from hubring.workers.launchers.placement import detect, set_aside
from hubring.workers.runtime.script_groups import export_place


def variables(prefix: str, text: str) -> dict[str, str]:
    """Returns an environment, written as in a shell."""
    return {prefix + name: value for name, _, value in (word.partition("=") for word in text.split())}


PLACE = "LOCAL_RANK=1 LOCAL_WORLD_SIZE=4"
TORCHRUN = variables("", f"TORCHELASTIC_RUN_ID=none RANK=5 WORLD_SIZE=8 {PLACE} GROUP_RANK=1")
OPEN_MPI = variables("OMPI_COMM_WORLD_", "RANK=3 SIZE=4 LOCAL_RANK=1 LOCAL_SIZE=2")
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = variables("SLURM_", "STEP_ID=0 PROCID=6 NTASKS=7 LOCALID=2 NODEID=1 STEP_TASKS_PER_NODE=4,3")
INDEXED = {"JOB_COMPLETION_INDEX": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
OURS = variables("", f"HUBRING_LAUNCHER=ps-run RANK=1 WORLD_SIZE=4 {PLACE} HOROVOD_RANK=1 HOROVOD_SIZE=4")
SHELL = (None, None, 0, 1, 0, "shell")
READ: dict[str, tuple[dict[str, str], tuple[object, ...]]] = {
    "torchrun": (TORCHRUN, (5, 8, 1, 4, 1, "torchrun")),
    "torchrun in srun": ({**SRUN, **TORCHRUN}, (5, 8, 1, 4, 1, "torchrun")),
    "torchrun in mpirun": ({**OPEN_MPI, **TORCHRUN}, (5, 8, 1, 4, 1, "torchrun")),
    "Open MPI": (OPEN_MPI, (3, 4, 1, 2, 1, "openmpi")),
    "Open MPI, whose daemons srun started": ({**SRUN, **OPEN_MPI}, (3, 4, 1, 2, 1, "openmpi")),
    "Hydra": (HYDRA, (3, 4, 1, 2, 1, "mpich")),
    "Hydra, whose daemons srun started": ({**SRUN, **HYDRA}, (3, 4, 1, 2, 1, "mpich")),
    "PMI alone": ({"PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4, 0, 1, 3, "mpich")),
    "PMIx": ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-1"}, (1, None, 0, 1, 1, "pmix")),
    "PMIx in an srun step": (
        {**SRUN, "PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-1"},
        (1, None, 0, 1, 1, "pmix"),
    ),
    "srun": (SRUN, (6, 7, 2, 3, 1, "slurm")),
    "srun --mpi=pmi2": ({**SRUN, "PMI_RANK": "6", "PMI_SIZE": "7"}, (6, 7, 2, 3, 1, "slurm")),
    "srun, for fewer tasks than the job's": (
        {**SRUN, "SLURM_STEP_NUM_TASKS": "7", "SLURM_NTASKS": "99"},
        (6, 7, 2, 3, 1, "slurm"),
    ),
    "a batch script": ({**SRUN, "SLURM_STEP_ID": ""}, SHELL),
    "the shell of salloc": ({**SRUN, "SLURM_STEP_ID": str(0xFFFFFFFA)}, SHELL),
    "an indexed Job": (INDEXED, (2, None, 0, 1, 2, "kubernetes")),
    "ps-run": (OURS, (1, 4, 1, 4, 0, "ps-run")),
    "ps-worker": (
        {**OURS, "HUBRING_LAUNCHER": "ps-worker", "HOROVOD_RANK": "7"},
        (1, 4, 1, 4, 0, "ps-worker"),
    ),
    "RANK by hand": ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 0, 1, 1, "environment")),
    "another program's HOROVOD_RANK": ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, SHELL),
    "a shell": ({"PATH": "/bin", "HOME": "/"}, SHELL),
}


@pytest.mark.parametrize("launcher", READ)
def test_launchers_are_read(launcher: str) -> None:
    environment, expected = READ[launcher]
    found = detect(environment)
    place = found.rank, found.size, found.local_rank, found.local_size, found.node_rank, found.launcher
    assert place == expected


def test_flags_alone_place_a_worker() -> None:
    found = detect({}, rank=2, world_size=4, local_rank=1)
    assert (found.rank, found.size, found.local_rank, found.launcher) == (2, 4, 1, "shell")
    assert found.sources == ("--rank 2", "--world-size 4", "--local-rank 1")


@pytest.mark.parametrize(("node", "tasks"), [(0, 4), (1, 4), (2, 3), (3, 1)])
def test_slurms_short_form_of_tasks_per_node_is_read(node: int, tasks: int) -> None:
    layout = {"SLURM_NODEID": str(node), "SLURM_STEP_TASKS_PER_NODE": "4(x2),3,1", "SLURM_LOCALID": "0"}
    assert detect({**SRUN, **layout}).local_size == tasks


@pytest.mark.parametrize(
    ("environment", "flags", "told"),
    [
        *(
            (
                {"RANK": "0", "WORLD_SIZE": text},
                {},
                r"WORLD_SIZE='.*': expected a whole number of 0 or more; unset or correct WORLD_SIZE",
            )
            for text in ("", "two", "-1", "1.5", "0x1")
        ),
        ({}, {"rank": 4, "world_size": 4}, "must be 0 to 3"),
        ({}, {"rank": -1}, "at least 0"),
        ({}, {"world_size": 0}, "at least 1"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, {}, r"LOCAL_RANK=4.*LOCAL_WORLD_SIZE=4"),
        *(
            ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": text}, {}, "SLURM_STEP_TASKS_PER_NODE")
            for text in ("4(x)", "four", "4")
        ),
        (TORCHRUN, {"rank": 4}, "--rank 4 and RANK=5"),
        (TORCHRUN, {"world_size": 2}, "--world-size 2 and WORLD_SIZE=8"),
        (SRUN, {"local_rank": 0}, "--local-rank 0 and SLURM_LOCALID=2"),
        ({"RANK": "1", **SRUN}, {}, "RANK=1 and SLURM_PROCID=6"),
        ({"WORLD_SIZE": "9", **OPEN_MPI}, {}, "WORLD_SIZE=9 and OMPI_COMM_WORLD_SIZE=4"),
        (INDEXED, {"rank": 1}, "--rank 1 and JOB_COMPLETION_INDEX=2"),
        ({**SRUN, "PMIX_NAMESPACE": "slurm.1.0", "PMIX_RANK": "5"}, {}, "SLURM_PROCID=6 and PMIX_RANK=5"),
    ],
)
def test_wrong_and_contradicting_numbers_are_refused_by_name_and_value(
    environment: dict[str, str], flags: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        detect(environment, **flags)


def test_sources_that_agree_are_all_named() -> None:
    assert "PMIX_RANK=6" in detect({**SRUN, "PMIX_NAMESPACE": "slurm.pmix.1.0", "PMIX_RANK": "6"}).sources
    found = detect({"RANK": "3", **OPEN_MPI}, rank=3)
    assert {"--rank 3", "RANK=3", "OMPI_COMM_WORLD_RANK=3"} <= set(found.sources)


def test_a_restart_is_noticed() -> None:
    assert detect({**SRUN, "SLURM_RESTART_COUNT": "2"}).restart == 2
    assert detect({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}).restart == 1


@pytest.mark.parametrize(
    ("hostname", "rank"),
    [("train-3", 3), ("train-3.train.svc", 3), ("train-03", None), ("train-24567", None), ("train", None)],
)
def test_a_pods_hostname_says_its_number_if_it_is_one(hostname: str, rank: int | None) -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert detect(pod, hostname=hostname).rank == rank
    assert detect({}, hostname=hostname).rank is None


def test_a_pods_hostname_says_nothing_where_somebody_else_says_the_rank() -> None:
    """Kubeflow's rank 1 is called job-worker-0."""
    assert (
        detect(
            variables("", "KUBERNETES_SERVICE_HOST=10.0.0.1 RANK=1 WORLD_SIZE=2"), hostname="job-worker-0"
        ).rank
        == 1
    )
    assert detect(INDEXED, hostname="job-0-7").rank == 2


def test_variables_of_an_outer_launcher_are_ignored_and_reported() -> None:
    assert "SLURM_PROCID=6" in set_aside({**SRUN, **TORCHRUN})
    assert set_aside(SRUN) == ()


def test_the_port_for_a_scripts_own_group_is_held_until_rank_0_listens_there() -> None:
    with meeting_variables({}) as meeting:
        host, port = meeting["MASTER_ADDR"], int(meeting["MASTER_PORT"])
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        for _ in range(2):  # the script may make its group again
            TCPStore(host, port, 1, is_master=True).set("key", "value")


def test_a_meeting_place_that_another_launcher_gave_counts() -> None:
    given = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
    with meeting_variables(given) as meeting:
        assert meeting == {}


def test_flags_agree_with_the_place_that_they_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    export_place(detect(os.environ, rank=1, world_size=2, local_rank=1))
    assert detect(os.environ, rank=1, world_size=2, local_rank=1).local_rank == 1

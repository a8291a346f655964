from __future__ import annotations

from typing import Any

import pytest

from hubring.ps.core.errors import ConfigError
from hubring.workers.launchers.placement import Placement, absent, detect, set_aside

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
}


def place(placement: Placement) -> tuple[int | None, int | None, int, int, int, str]:
    return (
        placement.rank,
        placement.size,
        placement.local_rank,
        placement.local_size,
        placement.node_rank,
        placement.launcher,
    )


def test_a_plain_shell_says_nothing() -> None:
    assert detect({"PATH": "/bin", "HOME": "/"}) == Placement()


def test_flags_alone_place_a_worker() -> None:
    found = detect({}, rank=2, world_size=4, local_rank=1)
    assert (found.rank, found.size, found.local_rank, found.launcher) == (2, 4, 1, "shell")
    assert found.sources == ("--rank 2", "--world-size 4", "--local-rank 1")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, (5, 8, 1, 4, 1, "torchrun")),
        (OPEN_MPI, (3, 4, 1, 2, 1, "openmpi")),
        (HYDRA, (3, 4, 1, 2, 1, "mpich")),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4, 0, 1, 3, "mpich")),
        (SRUN, (6, 7, 2, 3, 1, "slurm")),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 0, 1, 1, "environment")),
    ],
)
def test_launchers_are_read(environment: dict[str, str], expected: tuple[object, ...]) -> None:
    assert place(detect(environment)) == expected


def test_a_batch_script_is_no_srun_task() -> None:
    batch = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    assert detect(batch) == Placement()


def test_the_steps_number_of_tasks_comes_before_the_jobs() -> None:
    assert detect({**SRUN, "SLURM_STEP_NUM_TASKS": "7", "SLURM_NTASKS": "99"}).size == 7


@pytest.mark.parametrize(("node", "tasks"), [(0, 4), (1, 4), (2, 3), (3, 1)])
def test_slurms_short_form_of_tasks_per_node_is_read(node: int, tasks: int) -> None:
    layout = {"SLURM_NODEID": str(node), "SLURM_STEP_TASKS_PER_NODE": "4(x2),3,1", "SLURM_LOCALID": "0"}
    assert detect({**SRUN, **layout}).local_size == tasks


def test_torchrun_inside_srun_or_mpirun_counts_alone() -> None:
    outer = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    assert place(detect({**outer, **TORCHRUN})) == place(detect(TORCHRUN))
    assert place(detect({**OPEN_MPI, **TORCHRUN})) == place(detect(TORCHRUN))


def test_mpirun_whose_daemons_srun_started_counts_alone() -> None:
    assert place(detect({**SRUN, **OPEN_MPI})) == place(detect(OPEN_MPI))
    assert place(detect({**SRUN, **HYDRA})) == place(detect(HYDRA))


def test_what_srun_says_by_pmi_2_is_no_mpiexec() -> None:
    assert place(detect({**SRUN, "PMI_RANK": "6", "PMI_SIZE": "7"})) == place(detect(SRUN))


def test_sources_that_agree_are_all_named() -> None:
    found = detect({"RANK": "3", **OPEN_MPI}, rank=3)
    assert {"--rank 3", "RANK=3", "OMPI_COMM_WORLD_RANK=3"} <= set(found.sources)


@pytest.mark.parametrize(
    ("environment", "flags", "one", "other"),
    [
        (TORCHRUN, {"rank": 4}, "--rank 4", "RANK=5"),
        (TORCHRUN, {"world_size": 2}, "--world-size 2", "WORLD_SIZE=8"),
        (SRUN, {"local_rank": 0}, "--local-rank 0", "SLURM_LOCALID=2"),
        ({"RANK": "1", **SRUN}, {}, "RANK=1", "SLURM_PROCID=6"),
        ({"WORLD_SIZE": "9", **OPEN_MPI}, {}, "WORLD_SIZE=9", "OMPI_COMM_WORLD_SIZE=4"),
    ],
)
def test_sources_that_disagree_are_both_named_with_their_values(
    environment: dict[str, str], flags: dict[str, Any], one: str, other: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(environment, **flags)
    assert one in str(caught.value)
    assert other in str(caught.value)


@pytest.mark.parametrize("text", ["", "two", "-1", "1.5", "0x1"])
def test_what_is_no_number_is_refused_by_name(text: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"WORLD_SIZE='.*': expected a whole number of 0 or more; unset or correct WORLD_SIZE",
    ):
        detect({"RANK": "0", "WORLD_SIZE": text})


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ({"rank": 4, "world_size": 4}, "must be 0 to 3"),
        ({"rank": -1}, "at least 0"),
        ({"world_size": 0}, "at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused(flags: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        detect({}, **flags)


def test_a_local_rank_beyond_the_hosts_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LOCAL_RANK=4.*LOCAL_WORLD_SIZE=4"):
        detect({**TORCHRUN, "LOCAL_RANK": "4"})


@pytest.mark.parametrize("layout", ["4(x)", "four", "4"])
def test_a_tasks_per_node_that_makes_no_sense_is_refused(layout: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_STEP_TASKS_PER_NODE"):
        detect({**SRUN, "SLURM_STEP_TASKS_PER_NODE": layout})


INDEXED = {"JOB_COMPLETION_INDEX": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
OURS = {
    "HUBRING_LAUNCHER": "ps-run",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "4",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-1"}, (1, None, 0, 1, 1, "pmix")),
        (INDEXED, (2, None, 0, 1, 2, "kubernetes")),
        (OURS, (1, 4, 1, 4, 0, "ps-run")),
        ({**OURS, "HUBRING_LAUNCHER": "ps-worker", "HOROVOD_RANK": "7"}, (1, 4, 1, 4, 0, "ps-worker")),
    ],
)
def test_more_launchers_are_read(environment: dict[str, str], expected: tuple[object, ...]) -> None:
    assert place(detect(environment)) == expected


def test_pmix_of_srun_must_agree_with_srun() -> None:
    told = {**SRUN, "PMIX_NAMESPACE": "slurm.pmix.1.0"}
    assert place(detect({**told, "PMIX_RANK": "6"})) == place(detect(SRUN))
    with pytest.raises(ConfigError, match=r"SLURM_PROCID=6 and PMIX_RANK=5"):
        detect({**told, "PMIX_RANK": "5"})


def test_pmix_in_an_srun_step_counts_alone() -> None:
    assert detect({**SRUN, "PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-1"}).rank == 1


def test_horovods_variables_of_others_say_nothing() -> None:
    assert detect({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}) == Placement()


def test_the_shell_of_salloc_is_no_srun_task() -> None:
    assert detect({**SRUN, "SLURM_STEP_ID": str(0xFFFFFFFA)}) == Placement()


def test_a_restart_is_noticed() -> None:
    assert detect({**SRUN, "SLURM_RESTART_COUNT": "2"}).restart == 2
    assert detect({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}).restart == 1


@pytest.mark.parametrize(
    ("hostname", "rank"),
    [
        ("train-3", 3),
        ("train-3.train.default.svc", 3),
        ("train-03", None),
        ("train-24567", None),
        ("train", None),
    ],
)
def test_a_pods_hostname_says_its_number_if_it_is_one(hostname: str, rank: int | None) -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert detect(pod, hostname=hostname).rank == rank
    assert detect({}, hostname=hostname).rank is None


def test_a_pods_hostname_says_nothing_where_somebody_else_says_the_rank() -> None:
    """Kubeflow's rank 1 is called job-worker-0."""
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "RANK": "1", "WORLD_SIZE": "2"}
    assert detect(pod, hostname="job-worker-0").rank == 1
    assert detect(INDEXED, hostname="job-0-7").rank == 2


def test_an_index_that_contradicts_a_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--rank 1 and JOB_COMPLETION_INDEX=2"):
        detect(INDEXED, rank=1)


def test_what_an_outer_launcher_says_is_set_aside_and_told() -> None:
    assert "SLURM_PROCID=6" in set_aside({**SRUN, **TORCHRUN})
    assert set_aside(SRUN) == ()


def test_all_that_was_looked_at_and_is_not_there_is_told() -> None:
    gone = absent(TORCHRUN)
    assert "torchrun" in gone  # its restart count
    assert gone["torchrun"] == ("TORCHELASTIC_RESTART_COUNT",)
    assert "SLURM_PROCID" in gone["slurm"]
    assert "OMPI_COMM_WORLD_RANK" in gone["openmpi"]

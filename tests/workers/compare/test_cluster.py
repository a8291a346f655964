"""Comparisons over the tasks of a launcher: whose each program is, and who may join."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import convert, to_builtins

from hubring.ps.core.errors import HubringError, UsageError
from hubring.workers.compare import cli as command
from hubring.workers.compare.plan.experiment import Experiment
from hubring.workers.compare.run import link, meeting
from hubring.workers.compare.run.conductor import Conductor
from hubring.workers.compare.run.follower import ClusterFollower, FollowerHandle
from hubring.workers.compare.run.link import Hello, OtherEndLost, TaskConnection
from hubring.workers.compare.run.meeting import LauncherTask, check_experiment, find_task
from hubring.workers.compare.run.noise import ProcessCounts, of_machine
from hubring.workers.launchers.placement import FAMILIES, detect
from hubring.workers.peers.processes import Lifeline, clean_environment
from tests.support.compare.replayed import experiment


def hello(rank: int, host: str, **told: Any) -> Hello:
    """Returns the first message of a task of a cluster."""
    machine = {"processor": "an abacus", "cores": 4, "system": "Linux", "hubring": "1", "torch": "2"}
    usual: dict[str, Any] = {
        "boot": f"boot of {host}",
        "size": 4,
        "local_rank": rank % 2,
        "address": f"address of {host}",
        "cores": (0, 1, 2, 3),
    }
    return Hello(rank=rank, host=host, **(usual | {"machine": machine} | told))


TWO = Conductor([hello(0, "a"), hello(1, "a"), hello(2, "b"), hello(3, "b")], "slurm", {})
"""Two machines with two tasks each."""


SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
POD = {"JOB_COMPLETION_INDEX": "3", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}


LEAD, SECOND = LauncherTask(0, 2, 0, "slurm"), LauncherTask(1, 2, 1, "slurm")


# Tasks.


@pytest.mark.parametrize(
    ("environment", "task"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        (SRUN, LauncherTask(2, 4, 1, "slurm")),
        (TORCHRUN, LauncherTask(1, 2, 1, "torchrun")),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}, LauncherTask(1, 2, 1, "torchrun", together=True)),
        (POD | {"WORLD_SIZE": "4"}, LauncherTask(3, 4, 0, "kubernetes")),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "WORLD_SIZE": "4"}, LauncherTask(3, 4, 0, "kubernetes")),
    ],
)
def test_a_task_is_what_its_launcher_says(environment: dict[str, str], task: LauncherTask | None) -> None:
    assert find_task(environment, "dev-3") == task


def test_a_pod_that_does_not_know_how_many_there_are_is_told_the_mend() -> None:
    with pytest.raises(
        UsageError, match=r"JOB_COMPLETION_INDEX=3 \(kubernetes\) .* set WORLD_SIZE .* --alone"
    ):
        find_task(POD, "host")


def test_a_program_with_alone_is_no_launcher_task(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in POD.items():
        monkeypatch.setenv(name, value)
    assert command._place(alone=True) is None
    with pytest.raises(UsageError, match="--alone"):
        command._place(alone=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": (2, 8)}, "has 8 workers, but slurm started 4 tasks.*; start 8 tasks, or set at most 4"),
        ({"link": {"rate": (1e9,)}}, r"\[link\] emulates links on one machine"),
        ({"fault": {"rank": 1, "step": 3}}, r"\[fault\] can kill only a worker on the conductor's machine"),
    ],
)
def test_an_experiment_no_cluster_can_run_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    asked = convert(to_builtins(experiment()) | changes, Experiment)
    with pytest.raises(UsageError, match=words):
        check_experiment(asked, LauncherTask(0, 4, 0, "slurm"), tmp_path)


def test_a_cluster_wants_to_be_told_its_folder() -> None:
    with pytest.raises(UsageError, match="started 4 tasks, which write to one folder; with --out, name a"):
        check_experiment(experiment(), LauncherTask(0, 4, 0, "slurm"), None)


def test_workers_do_not_see_what_launchers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (name for family in FAMILIES for name in family.names):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun")
    assert detect(clean_environment(1), hostname="train-3").readings == ()


# Whose a program is.


@pytest.mark.parametrize(
    ("role", "rank"), [("server", 0), ("shard 1", 2), ("shard 2", 0), ("worker 1", 1), ("worker 3", 3)]
)
def test_workers_are_their_ranks_and_shards_go_from_machine_to_machine(role: str, rank: int) -> None:
    assert TWO.rank_of(role) == rank
    assert TWO.address(role) == f"address of {'ab'[rank // 2]}"


def test_threads_are_the_cores_of_the_fullest_machine() -> None:
    assert [TWO.threads(workers) for workers in (1, 2, 3, 4)] == [4, 2, 2, 2]


def test_tasks_that_are_bound_to_cores_of_their_own_have_them_all() -> None:
    bound = Conductor([hello(0, "a", cores=(0, 1)), hello(1, "a", cores=(2, 3))], "slurm", {})
    assert bound.threads(2) == 2


def test_containers_of_one_machine_share_it() -> None:
    pods = Conductor(
        [hello(0, "pod-0", boot="x"), hello(1, "pod-1", boot="x"), hello(2, "pod-2")], "kubernetes", {}
    )
    assert pods.machines() == [[0, 1], [2]]
    assert list(pods.machine["hosts"]) == ["pod-0, pod-1", "pod-2"]


def test_machines_with_different_versions_are_named() -> None:
    other = hello(0, "a").machine | {"torch": "3"}
    with pytest.raises(UsageError, match="torch is 2 on a and 3 on b; install the same version on all"):
        Conductor([hello(0, "a"), hello(1, "b", machine=other)], "slurm", {})


def test_cpu_time_of_other_tasks_on_the_machine_is_not_foreign() -> None:
    samples = [ProcessCounts((0.1, 0.2), 40.0, 30.0, 12.0), ProcessCounts((0.3, 0.4), 41.0, 31.0, 14.0)]
    assert of_machine(samples).foreign == pytest.approx(0.1)
    assert of_machine(samples).load == (0.1, 0.2)


# Conductor and follower.


Wires = tuple[TaskConnection, TaskConnection]


@pytest.fixture
def wires() -> Iterator[Wires]:
    """Two ends of one connection."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        one = TaskConnection(socket.create_connection(door.getsockname()))
        other = TaskConnection(door.accept()[0])
    yield one, other
    one.close()
    other.close()


def test_a_program_that_cannot_be_started_has_ended(wires: Wires, tmp_path: Path) -> None:
    here, there = wires
    for order in (
        link.StartRequest(name="worker 2", command=("train",), directory=str(tmp_path / "not"), threads=1),
        link.Over(code=1),
    ):
        here.send(order)
    with Lifeline() as lifeline:
        assert ClusterFollower(there, lifeline).follow() == 1
    member = FollowerHandle(hello(2, "b"), here)
    with pytest.raises(HubringError, match=r"rank 2 on b: worker 2 cannot be started .*; --out must be a"):
        member.code("worker 2", 10)
    assert member.code("worker 2", 10) == 127


@pytest.mark.parametrize("said", [b"not JSON", b'{"type": "Dance"}'])
def test_another_version_s_words_end_the_connection(wires: Wires, said: bytes) -> None:
    here, there = wires
    there._connection.send_bytes(said)
    with pytest.raises(OtherEndLost, match="install the same version on all machines"):
        here.receive(10)


@pytest.mark.parametrize("guesses_first", [False, True])
def test_a_wrong_key_is_refused(wires: Wires, guesses_first: bool) -> None:
    with ThreadPoolExecutor(1) as pool:
        guess = pool.submit(wires[1].prove, b"a guess", first=guesses_first)
        with pytest.raises(OtherEndLost, match="the other end did not prove itself"):
            wires[0].prove(b"the key", first=not guesses_first)
        assert isinstance(guess.exception(), OtherEndLost)


def test_an_end_s_answer_to_its_own_challenge_proves_nothing(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = wires
    monkeypatch.setattr("hubring.workers.compare.run.link.secrets.token_bytes", bytes)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(here.prove, b"the key", first=False)
        there._connection.send_bytes(bytes(32))
        answer = there._connection.recv_bytes()
        assert there._connection.recv_bytes() == bytes(32)
        there._connection.send_bytes(answer)
        assert isinstance(asked.exception(), OtherEndLost)


# Meeting.


@pytest.fixture(autouse=True)
def quick_to_look_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "AGAIN_SECONDS", 0.005)


def follow(folder: Path) -> int:
    """Joins as a follower; returns the mode of the file that names the meeting."""
    wire, _ = meeting.join(SECOND, folder, timeout=60)
    mode = stat.S_IMODE(os.stat(folder / meeting.MEETING_FILE).st_mode)
    wire.send(hello(1, "b", size=2))
    wire.close()
    return mode


def test_the_file_that_names_the_meeting_is_its_owners_and_goes_with_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(follow, tmp_path)
        came = meeting.invite(LEAD, tmp_path, "127.0.0.1", timeout=60)
        assert following.result() == 0o600
    assert [(rank, who.host) for rank, (who, _) in came.items()] == [(1, "b")]
    assert list(tmp_path.iterdir()) == []
    came[1][1].close()


def test_strangers_keep_no_member_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They say nothing, or begin a message that they never end; the oldest of too many are cut off."""
    monkeypatch.setattr(meeting, "MOST_STRANGERS", 2)
    with ThreadPoolExecutor(1) as pool, ExitStack() as strangers:
        inviting = pool.submit(meeting.invite, LEAD, tmp_path, "127.0.0.1", timeout=60)
        while not (file := tmp_path / meeting.MEETING_FILE).exists():
            assert not wait([inviting], timeout=0.001).done
        place = msgspec.json.decode(file.read_bytes(), type=meeting.ConductorAddress)
        ends = [socket.create_connection((place.host, place.port)) for _ in range(4)]
        for end in ends:
            strangers.enter_context(end)
            end.sendall(b"\0")
            end.settimeout(60)
        while ends[0].recv(1024):
            pass
        follow(tmp_path)
        assert list(inviting.result()) == [1]
        inviting.result()[1][1].close()


@pytest.mark.parametrize("mode", [0o640, 0o602])
def test_a_meeting_that_others_could_have_called_is_not_joined(tmp_path: Path, mode: int) -> None:
    place = meeting.ConductorAddress("127.0.0.1", 1, "a key")
    (tmp_path / meeting.MEETING_FILE).write_bytes(msgspec.json.encode(place))
    (tmp_path / meeting.MEETING_FILE).chmod(mode)
    with pytest.raises(UsageError, match=rf"conductor.json belongs to user \d+ with mode {mode:o}; expected"):
        meeting.join(SECOND, tmp_path, timeout=60)


def test_a_meeting_of_another_user_is_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / meeting.MEETING_FILE).touch(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: -1)
    with pytest.raises(UsageError, match=r"expected user -1.*\. Run all tasks as one user"):
        meeting.join(SECOND, tmp_path, timeout=60)


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    with pytest.raises(HubringError, match=r"of the 4 tasks that slurm started, rank 1, 2, 3 did not join"):
        meeting.invite(LauncherTask(0, 4, 0, "slurm"), tmp_path, "127.0.0.1", timeout=0.01)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_conductor_is_told_to_be_shared(tmp_path: Path) -> None:
    with pytest.raises(HubringError, match=r"rank 1 on .* found no conductor in .*must be a folder that all"):
        meeting.join(SECOND, tmp_path, timeout=0.01)

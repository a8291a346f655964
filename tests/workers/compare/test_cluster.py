"""Comparisons over the tasks of a launcher: whose each program is, and who may join."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec import convert, to_builtins

from hubring.ps.core.errors import HubringError, UsageError
from hubring.workers.compare.cluster import conductor, follower, meeting, messages
from hubring.workers.compare.cluster.follower import Follower
from hubring.workers.compare.cluster.host import describe
from hubring.workers.compare.cluster.link import Lost, Wire
from hubring.workers.compare.cluster.member import Gone, Member, Remote
from hubring.workers.compare.cluster.spread import Spread
from hubring.workers.compare.cluster.task import Task, check, find
from hubring.workers.compare.commands import run as command
from hubring.workers.compare.experiment.experiment import Experiment
from hubring.workers.compare.run.child_reaper_start import Lifeline
from hubring.workers.compare.run.noise import Sample, of_machine
from hubring.workers.compare.run.runner import clean_environment
from hubring.workers.launchers.placement import FAMILIES, detect
from tests.support.compare.hellos import TWO, hello
from tests.support.compare.replayed import experiment

SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
POD = {"JOB_COMPLETION_INDEX": "3", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}


LEAD, SECOND = Task(0, 2, 0, "slurm"), Task(1, 2, 1, "slurm")


# Tasks.


@pytest.mark.parametrize(
    ("environment", "task"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        (SRUN, Task(2, 4, 1, "slurm")),
        (TORCHRUN, Task(1, 2, 1, "torchrun")),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}, Task(1, 2, 1, "torchrun", together=True)),
        (POD | {"WORLD_SIZE": "4"}, Task(3, 4, 0, "kubernetes")),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "WORLD_SIZE": "4"}, Task(3, 4, 0, "kubernetes")),
    ],
)
def test_a_task_is_what_its_launcher_says(environment: dict[str, str], task: Task | None) -> None:
    assert find(environment, "dev-3") == task


def test_a_pod_that_does_not_know_how_many_there_are_is_told_the_mend() -> None:
    with pytest.raises(
        UsageError, match=r"JOB_COMPLETION_INDEX=3 \(kubernetes\) .* set WORLD_SIZE .* --alone"
    ):
        find(POD, "host")


def test_who_says_alone_is_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in POD.items():
        monkeypatch.setenv(name, value)
    assert command._place(alone=True) is None
    with pytest.raises(UsageError, match="--alone"):
        command._place(alone=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"workers": (2, 8)},
            "has 8 workers, but slurm started 4 tasks.*; start 8 tasks, or set at most 4",
        ),
        ({"link": {"rate": (1e9,)}}, r"\[link\] emulates links on one machine"),
        ({"fault": {"rank": 1, "step": 3}}, r"\[fault\] can kill only a worker on the conductor's machine"),
    ],
)
def test_what_a_cluster_cannot_run_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    asked = convert(to_builtins(experiment()) | changes, Experiment)
    with pytest.raises(UsageError, match=words):
        check(asked, Task(0, 4, 0, "slurm"), tmp_path)


def test_a_cluster_wants_to_be_told_its_folder() -> None:
    with pytest.raises(UsageError, match="started 4 tasks, which write to one folder; with --out, name a"):
        check(experiment(), Task(0, 4, 0, "slurm"), None)


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
    bound = Spread([hello(0, "a", cores=(0, 1)), hello(1, "a", cores=(2, 3))], "slurm")
    assert bound.threads(2) == 2


def test_the_report_names_every_machine_and_its_ranks() -> None:
    told = TWO.machine()
    assert told["launcher"] == "slurm"
    assert {host: each["ranks"] for host, each in told["hosts"].items()} == {"a": "0, 1", "b": "2, 3"}


def test_the_report_names_the_gpus_of_every_machine() -> None:
    other = hello(1, "b").machine | {"gpus": "2 x H100"}
    told = Spread([hello(0, "a"), hello(1, "b", machine=other)], "slurm").machine()
    assert [each.get("gpus") for each in told["hosts"].values()] == [None, "2 x H100"]


def test_containers_of_one_machine_share_it() -> None:
    pods = Spread([hello(0, "pod-0", boot="x"), hello(1, "pod-1", boot="x"), hello(2, "pod-2")], "kubernetes")
    assert pods.machines() == [[0, 1], [2]]
    assert list(pods.machine()["hosts"]) == ["pod-0, pod-1", "pod-2"]


def test_machines_of_one_name_are_told_apart_by_address() -> None:
    same = Spread([hello(0, "a", boot="x", address="one"), hello(1, "a", boot="y", address="two")], "slurm")
    assert list(same.machine()["hosts"]) == ["a at one", "a at two"]


def test_a_machine_is_busy_if_one_of_its_tasks_says_so() -> None:
    told = Spread([hello(0, "a"), hello(1, "b"), hello(2, "b", idle=False)], "slurm")
    assert told.busy() == ["b"]


def test_machines_with_different_versions_are_named() -> None:
    other = hello(0, "a").machine | {"torch": "3"}
    with pytest.raises(UsageError, match="torch is 2 on a and 3 on b; install the same version on all"):
        Spread([hello(0, "a"), hello(1, "b", machine=other)], "slurm")


def test_what_other_tasks_of_a_machine_took_is_not_foreign() -> None:
    samples = [Sample((0.1, 0.2), 40.0, 30.0, 12.0), Sample((0.3, 0.4), 41.0, 31.0, 14.0)]
    assert of_machine(samples).foreign == pytest.approx(0.1)
    assert of_machine(samples).load == (0.1, 0.2)


# Conductor and follower.


@pytest.fixture
def wires() -> Iterator[tuple[Wire, Wire]]:
    """Two ends of one connection."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        one = Wire(socket.create_connection(door.getsockname()))
        other = Wire(door.accept()[0])
    yield one, other
    one.close()
    other.close()


def test_a_program_of_a_follower_is_started_ended_and_asked_to_stop(
    wires: tuple[Wire, Wire], tmp_path: Path
) -> None:
    here, there = wires
    program = Remote("worker 2", ["train", "it"], tmp_path, Member(hello(2, "b"), here), threads=3)
    assert there.receive(10) == messages.Start(
        name="worker 2", command=("train", "it"), directory=str(tmp_path), threads=3
    )
    assert program.code is None
    program.ask_to_stop()
    assert there.receive(10) == messages.Stop(name="worker 2")
    there.send(messages.Ended(name="worker 2", code=-15))
    program.end(10)
    assert program.code == -15


def test_a_follower_that_is_gone_is_named_with_its_rank_and_machine(wires: tuple[Wire, Wire]) -> None:
    here, there = wires
    member = Member(hello(2, "b"), here)
    there.close()
    with pytest.raises(Gone, match=r"rank 2 on b is lost \(.*\) and the comparison ends\..*the same --out"):
        member.code("worker 2", 10)


def test_the_offset_of_a_follower_s_clock_is_what_to_add_to_its_times(
    wires: tuple[Wire, Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = wires
    ahead = 3_000_000_000
    monkeypatch.setattr(follower, "time", SimpleNamespace(time_ns=lambda: time.time_ns() + ahead))
    with ThreadPoolExecutor(1) as pool, Lifeline() as lifeline:
        following = pool.submit(Follower(there, lifeline).follow)
        found = Member(hello(2, "b"), here).clock_offset()
        here.send(messages.Over(code=0))
        assert following.result() == 0
    assert abs(found.ahead + ahead) <= found.round_trip / 2


def test_what_a_follower_cannot_do_is_told_with_its_rank_and_machine(wires: tuple[Wire, Wire]) -> None:
    here, there = wires
    there.send(messages.Failed(why="there is no such folder"))
    with pytest.raises(HubringError, match="rank 2 on b: there is no such folder"):
        Member(hello(2, "b"), here).code("worker 2", 10)


def test_a_program_that_cannot_be_started_has_ended(wires: tuple[Wire, Wire], tmp_path: Path) -> None:
    here, there = wires
    for order in (
        messages.Start(name="worker 2", command=("train",), directory=str(tmp_path / "not"), threads=1),
        messages.Over(code=1),
    ):
        here.send(order)
    with Lifeline() as lifeline:
        assert Follower(there, lifeline).follow() == 1
    member = Member(hello(2, "b"), here)
    with pytest.raises(HubringError, match=r"worker 2 cannot be started .*; --out must be a folder that all"):
        member.code("worker 2", 10)
    assert member.code("worker 2", 10) == 127


@pytest.mark.parametrize(
    ("raised", "code"), [(None, 0), (UsageError("no"), 2), (HubringError("no"), 1), (KeyboardInterrupt(), 1)]
)
def test_followers_end_with_the_conductor_s_exit_code(
    wires: tuple[Wire, Wire],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    raised: BaseException | None,
    code: int,
) -> None:
    here, there = wires
    own = describe(LEAD, None)
    guest = msgspec.structs.replace(own, rank=1)
    monkeypatch.setattr(conductor, "invite", lambda *_: {1: (guest, here)})
    with contextlib.suppress(type(raised or UsageError())), conductor.conduct(LEAD, tmp_path) as site:
        if raised is not None:
            raise raised
        site.code = 0
    assert there.receive(10) == messages.Over(code=code)


@pytest.mark.parametrize("said", [b"not JSON", b'{"type": "Dance"}'])
def test_another_version_s_words_end_the_connection(wires: tuple[Wire, Wire], said: bytes) -> None:
    here, there = wires
    there._connection.send_bytes(said)
    with pytest.raises(Lost, match="install the same version on all machines"):
        here.receive(10)


@pytest.mark.parametrize("guesses_first", [False, True])
def test_who_does_not_hold_the_key_is_no_member(wires: tuple[Wire, Wire], guesses_first: bool) -> None:
    with ThreadPoolExecutor(1) as pool:
        guess = pool.submit(wires[1].prove, b"a guess", first=guesses_first)
        with pytest.raises(Lost, match="does not hold the key"):
            wires[0].prove(b"the key", first=not guesses_first)
        assert isinstance(guess.exception(), Lost)


def test_who_holds_the_key_is_let_in_and_heard(wires: tuple[Wire, Wire]) -> None:
    with ThreadPoolExecutor(1) as pool:
        guest = pool.submit(wires[1].prove, b"the key", first=False)
        wires[0].prove(b"the key", first=True)
        assert guest.exception() is None
    wires[1].send(messages.Tell())
    assert wires[0].receive(10) == messages.Tell()


def test_an_end_s_answer_to_its_own_challenge_proves_nothing(
    wires: tuple[Wire, Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = wires
    monkeypatch.setattr("hubring.workers.compare.cluster.link.secrets.token_bytes", bytes)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(here.prove, b"the key", first=False)
        there._connection.send_bytes(bytes(32))
        answer = there._connection.recv_bytes()
        assert there._connection.recv_bytes() == bytes(32)
        there._connection.send_bytes(answer)
        assert isinstance(asked.exception(), Lost)


# Meeting.


@pytest.fixture(autouse=True)
def quick_to_look_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "AGAIN_SECONDS", 0.005)


class Guest(threading.Thread):
    """A follower that joins."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.mode = 0
        self.wire: Wire | None = None

    def run(self) -> None:
        self.wire, _ = meeting.join(SECOND, self._folder, timeout=60)
        self.mode = stat.S_IMODE(os.stat(self._folder / meeting.FILE).st_mode)
        self.wire.send(hello(1, "b", size=2))


def test_the_file_that_names_the_meeting_is_its_owners_and_goes_with_it(tmp_path: Path) -> None:
    guest = Guest(tmp_path)
    guest.start()
    came = meeting.invite(LEAD, tmp_path, "127.0.0.1", timeout=60)
    guest.join()
    assert guest.mode == 0o600
    assert [(rank, who.host) for rank, (who, _) in came.items()] == [(1, "b")]
    assert list(tmp_path.iterdir()) == []
    assert guest.wire is not None
    for wire in (guest.wire, came[1][1]):
        wire.close()


@pytest.mark.parametrize("mode", [0o640, 0o602])
def test_a_meeting_that_others_could_have_called_is_not_joined(tmp_path: Path, mode: int) -> None:
    place = meeting.Place("127.0.0.1", 1, "a key")
    (tmp_path / meeting.FILE).write_bytes(msgspec.json.encode(place))
    (tmp_path / meeting.FILE).chmod(mode)
    with pytest.raises(UsageError, match=rf"conductor.json belongs to user \d+ with mode {mode:o}; expected"):
        meeting.join(SECOND, tmp_path, timeout=60)


def test_a_meeting_of_another_user_is_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / meeting.FILE).touch(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: -1)
    with pytest.raises(UsageError, match=r"expected user -1.*\. Run all tasks as one user"):
        meeting.join(SECOND, tmp_path, timeout=60)


def test_another_conductor_s_file_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(*_: object) -> None:
        (tmp_path / meeting.FILE).write_text("another's")

    monkeypatch.setattr(meeting, "_welcome", overtaken)
    with pytest.raises(HubringError, match="did not join"):
        meeting.invite(LEAD, tmp_path, "127.0.0.1", timeout=60)
    assert (tmp_path / meeting.FILE).read_text() == "another's"


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    with pytest.raises(HubringError, match=r"of the 4 tasks that slurm started, rank 1, 2, 3 did not join"):
        meeting.invite(Task(0, 4, 0, "slurm"), tmp_path, "127.0.0.1", timeout=0.01)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_conductor_is_told_to_be_shared(tmp_path: Path) -> None:
    with pytest.raises(HubringError, match=r"rank 1 on .* found no conductor in .*must be a folder that all"):
        meeting.join(SECOND, tmp_path, timeout=0.01)

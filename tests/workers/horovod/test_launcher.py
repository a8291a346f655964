"""ps-run without processes: which flags change nothing, which hosts, and how failures are borne."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from hubring.ps.core.errors import UsageError
from hubring.workers.localrun import host
from hubring.workers.localrun.ignored_flags import IDLE, notices
from hubring.workers.localrun.job import LocalJob
from hubring.workers.localrun.script_command import ScriptCommand
from hubring.workers.localrun.team import Patience, Verdict
from hubring.workers.programs import ps_run


def test_flags_without_effect_are_listed_with_the_reason() -> None:
    assert list(notices(["gloo", "cycle_time_ms", "mpi"])) == [
        "--gloo, --mpi: no effect, since workers meet at the server, a ring always runs on Gloo or NCCL, and"
        " there is no MPI",
        "--cycle-time-ms: no effect, since operations start immediately, not in cycles",
    ]
    assert not list(notices([]))


def test_every_idle_flag_is_one_of_the_command() -> None:
    assert IDLE.keys() <= inspect.signature(ps_run.run).parameters.keys()


def test_a_discovery_script_says_which_hosts_there_are(tmp_path: Path) -> None:
    script = tmp_path / "discover.sh"

    def asked(body: str, default: int = 1) -> int | None:
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        return host.room(None, None, str(script), default)

    assert asked("echo localhost:3") == 3
    assert asked("echo localhost", default=2) == 2
    with pytest.raises(UsageError, match=r"'node7' is another machine.*srun, torchrun, mpirun"):
        asked("echo localhost:1; echo node7:1")
    with pytest.raises(UsageError, match="the script exited with 3: no cloud"):
        asked("echo no cloud >&2; exit 3")
    with pytest.raises(UsageError, match="the script exited with 127"):
        host.room(None, None, str(tmp_path / "none"))
    script.write_text("echo localhost:$1\n")
    assert host.room(None, None, f"{script} 4") == 4  # as in Horovod, a command for the shell


def test_a_lost_worker_is_restarted_while_another_has_the_state() -> None:
    patience = Patience(least=2, restarts=2)
    assert patience.verdict(running=1, finished=0) is Verdict.RESTART
    assert patience.verdict(running=1, finished=1) is Verdict.WITHOUT
    assert patience.verdict(running=0, finished=0) is Verdict.END
    assert patience.verdict(running=2, finished=0) is Verdict.RESTART
    assert patience.verdict(running=2, finished=0) is Verdict.WITHOUT
    assert patience.verdict(running=1, finished=0) is Verdict.END


def test_without_elastic_training_the_first_failure_ends_all() -> None:
    assert Patience(least=3).verdict(running=2, finished=0) is Verdict.END
    assert not LocalJob(num_proc=3).elastic
    assert LocalJob(num_proc=3, min_num_proc=1).elastic


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"num_proc": 2, "min_num_proc": 3}, "min-num-proc <= np"),
        ({"num_proc": 2, "max_num_proc": 1}, "np <= max-num-proc"),
        ({"num_proc": 3, "hosts": "localhost:2"}, "the hosts have only 2 slot"),
        ({"hosts": "localhost", "hostfile": Path("hosts")}, "--hosts and --hostfile both set the hosts"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        LocalJob(**flags).run(ScriptCommand(["train.py"]), {})  # type: ignore[arg-type]


def test_the_size_is_what_was_asked_for_or_what_there_is_room_for() -> None:
    assert LocalJob(hosts="localhost:3").size == 3
    assert LocalJob(hosts="localhost", slots_per_host=4).size == 4
    assert LocalJob(num_proc=2, hosts="localhost:3").size == 2
    assert LocalJob(min_num_proc=2).size == 2

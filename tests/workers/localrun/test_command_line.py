"""The command line of ps-run: hosts, flags, and a script or a module, behind python or not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hubring.ps.core.errors import UsageError
from hubring.workers.localrun import command_line
from hubring.workers.localrun.command_line import (
    ScriptCommand,
    ignored_notices,
    other_python,
    parse_command,
)
from hubring.workers.localrun.job import LocalJob
from hubring.workers.programs import ps_run


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "mod.py").touch()
    (tmp_path / "x.py").touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("x.py --lr 1", ScriptCommand(["x.py", "--lr", "1"])),
        ("python x.py -u", ScriptCommand(["x.py", "-u"])),
        ("/usr/bin/python3.11 -u x.py", ScriptCommand(["x.py"], options=("-u",))),
        ("python -W ignore x.py a", ScriptCommand(["x.py", "a"], options=("-W", "ignore"))),
        ("python -Wignore -X dev -OO x.py", ScriptCommand(["x.py"], False, ("-Wignore", "-X", "dev", "-OO"))),
        ("python -uW ignore x.py", ScriptCommand(["x.py"], options=("-uW", "ignore"))),
        ("python -m pkg.mod --lr 1", ScriptCommand(["pkg.mod", "--lr", "1"], True)),
        ("python -um pkg.mod", ScriptCommand(["pkg.mod"], True, ("-u",))),
        ("python -mpkg.mod a", ScriptCommand(["pkg.mod", "a"], True)),
    ],
)
def test_python_and_its_options_are_understood(words: str, expected: ScriptCommand) -> None:
    assert parse_command(words.split()) == expected


def test_a_module_of_ps_run_itself_is_one_of_this_folder_or_of_python() -> None:
    assert parse_command(["pkg.mod", "a"], is_module=True) == ScriptCommand(["pkg.mod", "a"], True)
    assert parse_command(["json.tool"], is_module=True).words == ["json.tool"]


def test_another_environments_python_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "python3"
    other.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert other_python(["python3", "x.py"]) == str(other)
    assert other_python([sys.executable, "x.py"]) == ""
    assert other_python(["x.py"]) == ""


@pytest.mark.parametrize(("option", "safe"), [("-P", True), ("-uI", True), ("-u", False), ("-WI", False)])
def test_a_safe_path_is_asked_for_by_options(option: str, safe: bool) -> None:
    assert ScriptCommand(["x.py"], options=(option,)).safe_path is safe


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "a script is missing: the command line names none; for example: ps-run"),
        ("python", "a script is missing"),
        ("python -m", "a module is missing"),
        ("--lr 1", "a script is missing: '--lr' is not a script"),
        ("python nosuch.py", r"script nosuch\.py does not exist; for example: ps-run"),
        ("python -m nosuch.mod", r"module nosuch\.mod does not exist in this folder"),
        ("python -c pass", "python -c: ps-run starts a script or a module only"),
        ("python -i x.py", "python -i: ps-run starts a script or a module only"),
    ],
)
def test_other_commands_are_refused_with_an_example(words: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        parse_command(words.split())


def test_hosts_are_this_machine_alone(tmp_path: Path) -> None:
    hostfile, script = tmp_path / "hosts", tmp_path / "discover.sh"
    hostfile.write_text("# mine\nlocalhost slots=3\n")
    script.write_text("echo localhost${1:+:$1}\n")
    script.chmod(0o755)
    assert command_line.host_slots(None, None, None) is None
    assert command_line.host_slots("localhost:4", None, None) == 4
    assert command_line.host_slots("localhost,127.0.0.1:2", None, None, default=3) == 5
    assert command_line.host_slots(None, hostfile, None) == 3
    assert command_line.host_slots(None, None, str(script), default=2) == 2
    assert command_line.host_slots(None, None, f"{script} 4") == 4  # as in Horovod, a command for the shell


@pytest.mark.parametrize(
    ("hosts", "told"),
    [
        (("localhost:2,node7:2", None, None), r"'node7' is another machine.*srun, torchrun, mpirun, or Kub"),
        (("localhost:many", None, None), "expected HOST:SLOTS"),
        (("localhost", "hosts", None), "--hosts and --hostfile both set the hosts"),
        ((None, "nosuch", None), "the file does not exist"),
        ((None, None, "echo localhost:1; echo node7:1"), "'node7' is another machine"),
        ((None, None, "echo no cloud >&2; exit 3"), "the script exited with 3: no cloud"),
        ((None, None, "./nosuch"), "the script exited with 127"),
    ],
)
def test_other_hosts_are_refused(hosts: tuple[str | None, str | None, str | None], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        command_line.host_slots(*hosts)


def test_flags_without_effect_are_listed_with_the_reason() -> None:
    assert list(ignored_notices(["gloo", "cycle_time_ms", "mpi"])) == [
        "--gloo, --mpi: no effect, since workers meet at the server, a ring always runs on Gloo or NCCL, and"
        " there is no MPI",
        "--cycle-time-ms: no effect, since operations start immediately, not in cycles",
    ]
    assert not list(ignored_notices([]))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"num_proc": 2, "min_num_proc": 3}, "min-num-proc <= np"),
        ({"num_proc": 2, "max_num_proc": 1}, "np <= max-num-proc"),
        ({"num_proc": 3, "hosts": "localhost:2"}, "the hosts have only 2 slot"),
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


def test_ps_run_too_ends_in_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        ps_run.app(["-np", "2", "nosuch.py"], standalone_mode=False)
    told = capsys.readouterr()
    assert told.err.startswith("ps-run: script nosuch.py does not exist")
    assert json.loads(told.out) == {"error": told.err.strip().removeprefix("ps-run: "), "exit_code": 2}

"""What stands after ps-run's flags: a script or a module, behind python and its options or not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hubring.ps.core.errors import UsageError
from hubring.workers.localrun.script_command import ScriptCommand, other_python, parse


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
    assert parse(words.split()) == expected


def test_a_module_of_ps_run_itself_is_one_of_this_folder_or_of_python() -> None:
    assert parse(["pkg.mod", "a"], is_module=True) == ScriptCommand(["pkg.mod", "a"], True)
    assert parse(["json.tool"], is_module=True).words == ["json.tool"]


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
        parse(words.split())

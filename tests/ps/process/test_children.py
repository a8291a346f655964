"""Child processes end when they should, and say how."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hubring.ps.process.child import Child, ending
from hubring.ps.process.children import Children, first_ended, passing_on
from hubring.ps.process.command import module_command
from tests.support.processes.process_tree import GRACE, ends_by

SLEEPER = ("sleep", "600")
DEAF = ("sh", "-c", "trap '' TERM; sleep 600 & echo $!; wait; wait")
"""Starts a process, says its id, and does not heed SIGTERM."""


def shell(line: str) -> Child:
    return Child("a shell", ("sh", "-c", line))


def test_our_programs_never_import_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stranger.py").write_text("print('run')")
    monkeypatch.chdir(tmp_path)
    command = module_command("stranger", "word")
    assert command == [sys.executable, "-P", "-m", "stranger", "word"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "No module named stranger" in ended.stderr


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exited with 0"),
        (75, "exited with 75"),
        (-9, "was killed by signal 9 (SIGKILL)"),
        (-40, "was killed by signal 40"),
    ],
)
def test_an_end_is_told_in_words(code: int, words: str) -> None:
    assert ending(code) == words


def test_a_child_tells_its_end_and_its_exit_code_as_a_shell_does() -> None:
    child = shell("exit 3")
    assert (child.exit_code(), child.code, child.ended) == (3, 3, "exited with 3")
    child = shell("kill -9 $$")
    assert (child.exit_code(), child.code) == (128 + 9, -9)
    assert f"{child} {child.ended}" == f"a shell (pid {child.pid}) was killed by signal 9 (SIGKILL)"


def test_a_child_that_runs_has_no_code_and_leads_its_group() -> None:
    child, leader = Child("one", SLEEPER), Child("other", SLEEPER, session=True)
    try:
        assert (child.code, child.ended, child.wait(0.0)) == (None, "", False)
        assert os.getpgid(child.pid) == child.pid
        assert os.getsid(child.pid) == os.getsid(0)
        assert os.getsid(leader.pid) == leader.pid
    finally:
        child.stop()
        leader.stop()
    assert child.code == leader.code == -signal.SIGTERM


def test_a_child_stops_by_an_empty_line_though_a_fork_holds_the_pipe() -> None:
    child = Child("one", ("sh", "-c", "read line"), stdin=subprocess.PIPE)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[child.stdin.fileno()]):
        child.stop(GRACE)
    assert child.code == 0


def test_a_child_that_has_ended_may_still_be_asked_to_stop() -> None:
    for stdin in (subprocess.PIPE, subprocess.DEVNULL):
        child = Child("one", ("true",), stdin=stdin)
        child.wait()
        child.signal(signal.SIGTERM)
        child.stop(0.0)
        child.stop(0.0)
        assert child.code == 0


def test_a_child_that_will_not_stop_is_killed_with_all_that_it_started(
    caplog: pytest.LogCaptureFixture,
) -> None:
    child = Child("deaf", DEAF, stdout=subprocess.PIPE)
    with child.stdout as said:
        started = int(said.readline())
    child.stop(0.0)
    assert child.code == -signal.SIGKILL
    assert ends_by(started, time.monotonic() + GRACE)
    assert caplog.messages == [f"deaf (pid {child.pid}) did not stop in time; killing it"]


def fail_among(children: Children[Child]) -> None:
    with children:
        children.add(Child("one", SLEEPER))
        deaf = children.add(Child("deaf", DEAF, stdout=subprocess.PIPE))
        with deaf.stdout as said:
            said.readline()
        raise ValueError


def test_children_end_together_when_one_step_fails() -> None:
    children: Children[Child] = Children(grace=0.1)
    with pytest.raises(ValueError):  # noqa: PT011 - it is ours
        fail_among(children)
    assert [child.code for child in children.started] == [-signal.SIGTERM, -signal.SIGKILL]


def test_the_first_end_among_children_is_met_and_no_other() -> None:
    with Children[Child]() as children:
        running = [children.add(Child("one", SLEEPER)), children.add(Child("two", SLEEPER))]
        assert first_ended(running, 0.0) is None
        children.started[1].signal(signal.SIGUSR1)
        assert first_ended(running) is running[1]
        assert first_ended(running, 0.0) is running[1]
        assert first_ended(running[:1], 0.0) is None


def test_an_end_that_a_signal_handler_saw_first_is_met_too(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.pidfd_open

    def too_late(pid: int) -> int:
        child.stop()
        return opened(pid)

    child = Child("one", SLEEPER)
    monkeypatch.setattr(os, "pidfd_open", too_late)
    assert first_ended([child], 0.0) is child
    assert child.code == -signal.SIGTERM


def test_a_signal_goes_to_all_children_while_the_block_lasts() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with Children[Child]() as children, passing_on([signal.SIGUSR1], children.signal):
        for name in ("one", "two"):
            children.add(Child(name, SLEEPER))
        signal.raise_signal(signal.SIGUSR1)
        assert [child.exit_code() for child in children.started] == [128 + signal.SIGUSR1] * 2
    assert signal.getsignal(signal.SIGUSR1) == before

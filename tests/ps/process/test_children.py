"""Child processes end when they should, say how, and are started again when that helps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from subprocess import PIPE

import pytest

from hubring.ps.process.child import (
    Adopted,
    Child,
    Children,
    Process,
    ending,
    first_ended,
    passing_on,
    process,
)
from hubring.ps.process.restarts import Restarts, restart_helps, wait_to_restart
from tests.support.processes.process_tree import GRACE, ends_by

SLEEPER = ("sleep", "600")
DEAF = ("sh", "-c", "trap '' TERM; sleep 600 & echo $!; wait; wait")
"""Starts a process, says its id, and does not heed SIGTERM."""


def shell(line: str) -> Child:
    return Child("a shell", ("sh", "-c", line))


def test_a_child_tells_its_end_and_its_exit_code_as_a_shell_does() -> None:
    child = shell("exit 3")
    assert (child.exit_code(), child.code, child.ended) == (3, 3, "exited with 3")
    child = shell("kill -9 $$")
    assert (child.exit_code(), child.code) == (128 + 9, -9)
    assert ending(-40) == "was killed by signal 40"
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
        runs.stop()
        return opened(pid)

    runs = Child("one", SLEEPER)
    monkeypatch.setattr(os, "pidfd_open", too_late)
    assert first_ended([runs], 0.0) is runs
    assert runs.code == -signal.SIGTERM


def test_a_signal_goes_to_all_children_while_the_block_lasts() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with Children[Child]() as children, passing_on([signal.SIGUSR1], children.signal):
        for name in ("one", "two"):
            children.add(Child(name, SLEEPER))
        signal.raise_signal(signal.SIGUSR1)
        assert [child.exit_code() for child in children.started] == [128 + signal.SIGUSR1] * 2
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=PIPE, stderr=subprocess.DEVNULL) as child:
        yield child
        child.kill()


def test_a_process_is_watched_until_it_ends(child: subprocess.Popen[bytes]) -> None:
    adopted = Adopted("a shard", process(child.pid))
    assert (str(adopted), adopted.ended) == (f"a shard (pid {child.pid})", "")
    child.kill()
    assert adopted.wait(30)
    assert adopted.ended == "has ended"
    adopted.end(0.0)


def test_a_process_that_does_not_stop_is_killed(child: subprocess.Popen[bytes]) -> None:
    adopted = Adopted("a shard", process(child.pid))
    adopted.end(0.0)
    assert child.wait(30) < 0
    assert adopted.ended


def test_a_process_that_had_ended_is_never_signalled(child: subprocess.Popen[bytes]) -> None:
    gone = Process(child.pid, process(child.pid).started - 1)  # its number belongs to another process now
    adopted = Adopted("a shard", gone)
    assert adopted.ended
    adopted.ask_to_stop()
    adopted.end(0.0)
    assert child.poll() is None


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((69, 75, 128 + signal.SIGKILL, 128 + signal.SIGSEGV, 128 + signal.SIGTERM), True),
        ((0, 1, 2, 64, 74, 78, 128 + signal.SIGINT, 128 + signal.SIGPIPE), False),
    ],
)
def test_only_a_loss_is_helped(codes: tuple[int, ...], expected: bool) -> None:
    assert [restart_helps(code) for code in codes] == [expected] * len(codes)


def test_progress_allows_all_restarts_again() -> None:
    restarts = Restarts(2, first_pause=5.0)
    pauses = [restarts.next_pause(), restarts.next_pause()]
    restarts.note_progress()
    assert restarts.left == 2
    assert [*pauses, restarts.next_pause()] == [5, 10, 5]
    assert (restarts.left, restarts.total) == (1, 3)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)]
)
def test_a_signal_ends_the_wait(number: int, code: int) -> None:
    assert wait_to_restart(1000.0, [number]) == code
    assert wait_to_restart(0.0, []) == 0

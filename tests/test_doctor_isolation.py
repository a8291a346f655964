"""A check that crashes, raises or hangs is a finding, and takes no other with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ps.doctor.check import Check
from ps.doctor.finding import Finding, failure, ok
from ps.doctor.isolation import examine

LONG = 60.0
"""Seconds, more than any check here takes on the busiest machine."""


def fine() -> Iterator[Finding]:
    yield ok("fine", "it is")
    yield ok("finer", "it is")


def raises() -> Iterator[Finding]:
    yield ok("before", "was well")
    raise RuntimeError("no such colour: seven")


def crashes() -> Iterator[Finding]:
    os.write(2, b"first words\nIllegal something\n")
    os.kill(os.getpid(), signal.SIGTERM)
    yield ok("never", "told")


def hangs() -> Iterator[Finding]:
    signal.pause()
    yield ok("never", "told")


def chatters() -> Iterator[Finding]:
    os.write(1, b"noise " * 1_000_000)
    yield ok("chatters", "on")


def test_checks_are_told_in_their_order() -> None:
    found = examine([Check("a", fine, "-"), Check("b", fine, "-")], LONG)
    assert found == [ok("fine", "it is"), ok("finer", "it is")] * 2


def test_one_that_raises_tells_what_and_keeps_what_it_had_told() -> None:
    found = examine([Check("a", raises, "mend it"), Check("b", fine, "-")], LONG)
    words = "the check exited with 1; it said last: RuntimeError: no such colour: seven"
    assert found == [ok("before", "was well"), failure("a", words, "mend it"), *fine()]


def test_one_that_crashes_tells_by_which_signal_and_its_last_words() -> None:
    found = examine([Check("a", crashes, "mend it"), Check("b", fine, "-")], LONG)
    words = f"the check was killed by signal {signal.SIGTERM.value}; it said last: Illegal something"
    assert found == [failure("a", words, "mend it"), *fine()]


@pytest.mark.slow
def test_one_that_hangs_is_killed_when_its_time_is_over() -> None:
    [late] = examine([Check("a", hangs, "mend it")], 0.5)
    assert (late.name, late.state, late.found) == ("a", "failure", "no answer within 0.5 s")
    assert late.mend == "mend it; or, where this machine is slow: ps-server doctor --timeout 3"


@pytest.mark.slow
def test_what_a_hanging_check_started_ends_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"

    def starts() -> Iterator[Finding]:
        with subprocess.Popen(["sleep", "600"]) as sleeper:
            note.write_text(str(sleeper.pid))
            yield ok("started", "one")

    found = examine([Check("a", starts, "-")], 3.0)
    assert found[-1].found == "no answer within 3 s"
    sleeper = int(note.read_text())
    with contextlib.suppress(
        ChildProcessError
    ):  # its parent had a moment to wait for it; else it is ours now
        os.waitpid(sleeper, 0)
    assert not Path(f"/proc/{sleeper}").exists()


def test_one_that_talks_more_than_anybody_reads_is_not_held_up() -> None:
    assert examine([Check("a", chatters, "-")], LONG) == [ok("chatters", "on")]


def test_what_checks_say_is_kept_from_the_screen(capfd: pytest.CaptureFixture[str]) -> None:
    examine([Check("a", chatters, "-"), Check("b", crashes, "-")], LONG)
    assert capfd.readouterr() == ("", "")


def test_no_descriptor_and_no_process_is_left() -> None:
    before = left()
    examine([Check("a", fine, "-"), Check("b", crashes, "-")], LONG)
    assert left() == before


def left() -> tuple[list[str], str]:
    """Our open files and our children, those included for which nobody has waited."""
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
    return os.listdir("/proc/self/fd"), children


SCRIPT = """
import os, signal, sys
from ps.doctor.check import Check
from ps.doctor.isolation import examine

def hangs():
    os.write(out, b"%d\\n" % os.getpid())
    signal.pause()
    yield

out = os.dup(1)
examine([Check("a", hangs, "-")], 1.0)
"""


@pytest.mark.slow
def test_a_check_ends_by_itself_if_the_doctor_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as doctor:
        assert doctor.stdout is not None
        check = int(doctor.stdout.readline())
        doctor.kill()
        doctor.wait()
        assert -os.waitstatus_to_exitcode(os.waitpid(check, 0)[1]) == signal.SIGALRM

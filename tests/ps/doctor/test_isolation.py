"""A check that crashes, raises or hangs is a finding, and takes no other with it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hubring.ps.doctor.finding import Finding, failure, ok
from hubring.ps.doctor.isolation import Check, examine
from tests.support.processes.process_tree import ends_by

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


def works() -> Iterator[Finding]:
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        pass
    yield ok("never", "told")


def chatters() -> Iterator[Finding]:
    os.write(1, b"noise " * 1_000_000)
    yield ok("chatters", "on")


def test_checks_are_told_in_their_order() -> None:
    found = examine([Check("a", fine, "-"), Check("b", fine, "-")], LONG)
    assert found == [ok("fine", "it is"), ok("finer", "it is")] * 2


def test_one_that_raises_tells_what_and_keeps_what_it_had_told() -> None:
    found = examine([Check("a", raises, "fix it"), Check("b", fine, "-")], LONG)
    words = "the check exited with 1; last output: RuntimeError: no such colour: seven"
    assert found == [ok("before", "was well"), failure("a", words, "fix it"), *fine()]


def test_one_that_crashes_tells_by_which_signal_and_its_last_words() -> None:
    found = examine([Check("a", crashes, "fix it"), Check("b", fine, "-")], LONG)
    words = "the check was killed by signal 15 (SIGTERM); last output: Illegal something"
    assert found == [failure("a", words, "fix it"), *fine()]


@pytest.mark.slow
def test_one_that_hangs_is_killed_when_its_time_is_over() -> None:
    [late] = examine([Check("a", hangs, "fix it")], 3.0)
    assert re.fullmatch(r"no answer within \d+ s", late.found)
    assert late == failure("a", late.found, "fix it")


@pytest.mark.slow
@pytest.mark.parametrize("check", [hangs, works])
def test_one_whose_time_others_used_up_is_skipped_and_is_no_failure(check: Callable[[], Any]) -> None:
    late, further = examine([Check("a", check, "fix it", ("b",))], 0.2, whole=LONG)
    assert (late.name, late.state, further.state) == ("a", "skipped", "skipped")
    assert re.match(
        r"only [\d.]+ s of 60 s were left for it: this machine is slow or busy \(load", late.found
    )
    assert late.found.endswith("use ps-server doctor --timeout 240")
    assert further.found == "a had no time"


def test_one_that_answers_in_the_little_time_left_counts() -> None:
    assert examine([Check("a", fine, "-")], LONG, whole=100 * LONG) == [*fine()]


@pytest.mark.slow
def test_the_time_that_it_had_is_told_and_not_the_time_that_it_should_have_had() -> None:
    [late] = examine([Check("a", hangs, "fix it")], 3.0, whole=10.0)
    assert re.fullmatch(r"no answer within [3-9] s", late.found)


@pytest.mark.slow
def test_one_that_works_slowly_is_told_from_one_that_hangs() -> None:
    late, further = examine([Check("a", works, "fix it", ("b",))], 1.0)
    assert (late.name, late.state) == ("a", "warning")
    assert re.match(
        r"still at work after [\d.]+ s: this machine is slow or busy \(load [\d.]+ on", late.found
    )
    assert late.fix == "ps-server doctor --timeout 60"
    assert further.found == "a did not finish"


@pytest.mark.slow
def test_what_a_hanging_check_started_ends_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"

    def starts() -> Iterator[Finding]:
        with subprocess.Popen(["sleep", "600"]) as sleeper:
            note.write_text(str(sleeper.pid))
            yield ok("started", "one")

    found = examine([Check("a", starts, "-")], 3.0)
    assert found[-1].found.startswith("no answer within ")
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
    files, children = left()
    examine([Check("a", fine, "-"), Check("b", crashes, "-")], LONG)
    now_files, now_children = left()
    assert now_files <= files  # what an earlier test left may go meanwhile
    assert now_children <= children


def left() -> tuple[set[str], set[str]]:
    """Our open files and our children, those included for which nobody has waited."""
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
    return set(os.listdir("/proc/self/fd")), set(children.split())


SCRIPT = """
import os, signal, sys
from hubring.ps.doctor.isolation import Check, examine

def hangs():
    with open(sys.argv[1], "w") as note:
        print(os.getpid(), file=note)
    signal.pause()
    yield

def further():
    yield from examine([Check("b", hangs, "-")], 600.0)

examine([Check("a", further, "-")], 600.0)
"""


@pytest.mark.slow
def test_checks_end_with_the_doctor_however_that_ends(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    os.mkfifo(note)
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(note)]) as doctor:
        check = int(note.read_text())
        doctor.kill()
    assert ends_by(check, time.monotonic() + LONG)


def further() -> Iterator[Finding]:
    yield from examine([Check("c", fine, "-"), Check("d", crashes, "fix it")], LONG)


def test_a_check_may_run_others_in_the_same_way() -> None:
    found = examine([Check("a", further, "-"), Check("b", fine, "-")], LONG)
    assert [finding.name for finding in found] == ["fine", "finer", "d", "fine", "finer"]


def test_what_a_check_did_not_come_to_is_told_as_left_out() -> None:
    found = examine([Check("a", raises, "fix it", further=("before", "after"))], LONG)
    assert [(finding.name, finding.state) for finding in found] == [
        ("before", "ok"),
        ("a", "failure"),
        ("after", "skipped"),
    ]
    assert found[-1].found == "a failed"

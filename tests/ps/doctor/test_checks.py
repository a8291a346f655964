"""A check that crashes, raises or hangs is a finding, and takes no other with it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hubring.ps.config.server import ServerConfig
from hubring.ps.core.errors import ConfigError
from hubring.ps.doctor import checks
from hubring.ps.doctor.check import DoctorCheck, Finding, Subject, failure, ok, skipped
from hubring.ps.doctor.checks import judge, run_check, seconds_at_work
from tests.support.processes.process_tree import ends_by

PATIENCE = 60.0


def fine() -> Iterator[Finding]:
    yield ok("fine", "it is")
    yield ok("finer", "it is")


def raises() -> Iterator[Finding]:
    yield ok("before", "was well")
    raise RuntimeError("no such colour: seven")


def exits() -> Iterator[Finding]:
    sys.exit(3)


FINE = DoctorCheck("fine", fine, "-")
RAISES = DoctorCheck("a", raises, "fix it", ("before", "after"))
OTHER = DoctorCheck("b", fine, "fix that", ("c",))


def answers(*ran: DoctorCheck) -> bytes:
    output = io.BytesIO()
    for check in ran:
        run_check(check, output)
    return output.getvalue()


def judged(
    ran: Sequence[DoctorCheck], output: bytes, *, in_turn: bool = False, crashed: bool = False
) -> list[Finding]:
    def end(check: DoctorCheck) -> Finding:
        return failure(check.name, "it ended", check.fix)

    found = judge(ran, output, end, in_turn=in_turn, crashed=crashed)
    return [finding for each in found.values() for finding in each]


def test_one_that_raises_tells_what_and_keeps_what_it_had_told() -> None:
    assert judged([RAISES, FINE], answers(RAISES, FINE)) == [
        ok("before", "was well"),
        failure("a", "the check raised RuntimeError: no such colour: seven", "fix it"),
        skipped("after", "a failed"),
        *fine(),
    ]


def test_a_library_that_exits_is_told() -> None:
    check = DoctorCheck("a", exits, "fix it")
    assert judged([check], answers(check)) == [failure("a", "the check raised SystemExit: 3", "fix it")]


def test_of_checks_in_turn_those_after_one_that_failed_are_skipped() -> None:
    assert judged([RAISES, OTHER], answers(RAISES), in_turn=True)[-2:] == [
        skipped("b", "a failed"),
        skipped("c", "a failed"),
    ]


def test_of_a_crash_the_first_that_did_not_end_is_the_cause() -> None:
    assert judged([FINE, RAISES, OTHER], answers(FINE), crashed=True) == [
        *fine(),
        failure("a", "it ended", "fix it"),
        *(skipped(name, "a failed") for name in ("before", "after", "b", "c")),
    ]


def test_side_by_side_each_that_hangs_is_told_and_half_a_line_is_dropped() -> None:
    told = judged([RAISES, FINE, OTHER], answers(FINE) + b'["a",{"na')
    assert [finding.name for finding in told] == ["a", "before", "after", "fine", "finer", "b", "c"]
    assert [finding.state for finding in told].count("failure") == 2


def test_a_machine_that_lets_nothing_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def popen(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(ConfigError, match="Too many open files; raise ulimit -n"):
        checks.examine(Subject(ServerConfig(), None, None, {}, 1.0))


def test_the_time_of_other_threads_does_not_count() -> None:
    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("busy")
        deadline = time.thread_time() + 0.05
        while time.thread_time() < deadline:
            pass
        done.set()
        leave.wait()

    done, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    done.wait()
    with_it, without = seconds_at_work(os.getpid(), "busy"), seconds_at_work(os.getpid(), "idle")
    leave.set()
    thread.join()
    assert with_it - without >= 0.04


HANGING = """
import os, sys
from hubring.ps.config.server import ServerConfig
from hubring.ps.doctor.check import Subject
from hubring.ps.doctor.checks import CheckProcess, other_checks

subject = Subject(ServerConfig(), None, None, {}, 600.0)
checks = CheckProcess("machine", other_checks(subject), subject)
print(checks.process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_checks_end_with_the_doctor_however_that_ends() -> None:
    started = subprocess.run([sys.executable, "-c", HANGING], stdout=subprocess.PIPE)
    assert ends_by(int(started.stdout), time.monotonic() + PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize(("at_work", "state"), [(0.15, "warning"), (0.05, "failure")])
def test_one_that_works_slowly_is_told_from_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch, at_work: float, state: str
) -> None:
    """No process imports torch in the time that it has here."""
    monkeypatch.setattr(checks, "seconds_at_work", lambda pid, name: at_work)
    found = checks.examine(Subject(ServerConfig(), None, None, {}, 0.2))
    told = {finding.name: finding for finding in found}
    words = "still at work after 0.2 s" if state == "warning" else "no answer within 0.2 s"
    assert (told["torch"].state, told["torch"].found.startswith(words)) == (state, True)
    end = "torch did not finish" if state == "warning" else "torch failed"
    assert [told[name] for name in ("CUDA", "NCCL", "Gloo")] == [
        skipped(name, end) for name in ("CUDA", "NCCL", "Gloo")
    ]

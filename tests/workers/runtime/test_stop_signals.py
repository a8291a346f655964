"""A script that was asked to stop and takes no more steps ends all the same."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from hubring.workers.runtime import context, stop_signals
from hubring.workers.runtime.stop_signals import StopSignals
from tests.support.fakes.clock import FakeTime
from tests.workers import scripts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_pythons")]

RUN = """
import sys
from hubring.workers.runtime import stop_signals
from hubring.workers.programs import ps_worker
stop_signals.GRACE_SECONDS = 0.2
sys.argv[0] = "ps-worker"
ps_worker.main()
"""
TRAIN = f"""{scripts.TRAIN}
import signal, time
def step():
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
for _ in range(2):
    step()
"""
SOON_STUCK = "from hubring.workers.runtime import stop_signals\nstop_signals.STUCK_SECONDS = 0.2\n"
TERM = "signal.raise_signal(signal.SIGTERM)\n"
EVALUATE = "for _ in range(60_000): time.sleep(0.01)\n"


def ended(folder: Path, script: str, before: str = TRAIN) -> subprocess.CompletedProcess[str]:
    file = folder / "script.py"
    file.write_text(before + script)
    command = [sys.executable, "-c", RUN, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


NOTICE = "signal.raise_signal(signal.SIGUSR1)\ntime.sleep(1)\n"
DEAF = f"{SOON_STUCK}signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
LONG = "time.sleep(1)\nstep()\n"
GRACE = "SIGTERM: stopping after this step, or if none ends within 0 s; send it again"


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (TERM + EVALUATE, [GRACE, "stopped on request; no step ended within 0 s"]),
        (NOTICE + TERM + EVALUATE, ["no step ended within"]),
        (f"{LONG}{TERM}{LONG}raise AssertionError\n", ["stopped on request after this step"]),
        (TERM + DEAF + EVALUATE, ["the script does not react, so this process ends at once"]),
    ],
    ids=["no more steps", "time until SIGTERM", "a step as long as the last", "deaf"],
)
def test_a_script_ends_after_its_grace_or_its_step(tmp_path: Path, script: str, told: list[str]) -> None:
    done = ended(tmp_path, script)
    assert done.returncode == 75, done.stderr
    assert [words for words in told if words not in done.stderr] == []


def test_every_step_after_a_signal_has_the_whole_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = SimpleNamespace(completed_steps=0, step_seconds=0.0, leaving=False)
    clock, signals = FakeTime(), StopSignals()

    def sleep(_: float) -> None:
        clock.advance(0.75 * stop_signals.GRACE_SECONDS)
        worker.completed_steps += 1
        worker.leaving = worker.completed_steps == 4

    monkeypatch.setattr(stop_signals, "time", SimpleNamespace(monotonic=clock.now, sleep=sleep))
    monkeypatch.setattr(context, "started", lambda: worker)
    monkeypatch.setattr(signal, "pthread_kill", lambda *_: pytest.fail("the worker is ended"))
    signals._watched = clock
    signals._watch(worker, signal.SIGTERM, clock)  # type: ignore[arg-type]


CLEAN_UP = f"""{SOON_STUCK}
try:
    signal.raise_signal(signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
    print("cleaned up")
"""


@pytest.mark.parametrize("before", [TRAIN + TERM, "import signal, time\n"], ids=["trained", "before init"])
def test_a_script_that_catches_the_error_cleans_up_as_long_as_it_needs(tmp_path: Path, before: str) -> None:
    done = ended(tmp_path, CLEAN_UP, before)
    assert "cleaned up" in done.stdout, done.stderr


# The signal comes during the call, which ends with this process.
STUCK = f"""{SOON_STUCK}
import ctypes
ctypes.CDLL(None).system(b"exec >/dev/null 2>&1; kill $PPID; while kill -0 $PPID; do sleep 0.1; done")
"""


@pytest.mark.parametrize("before", [TRAIN, ""], ids=["trained", "before init"])
def test_a_script_in_a_long_call_of_another_library_ends(tmp_path: Path, before: str) -> None:
    done = ended(tmp_path, STUCK, before)
    assert done.returncode == 75, done.stderr
    assert "the script does not react, so this process ends at once" in done.stderr


def test_a_signal_to_a_forked_child_is_not_its_parents(tmp_path: Path) -> None:
    fork = """
import os
child = os.fork()
if not child:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.raise_signal(signal.SIGTERM)
os.waitpid(child, 0)
time.sleep(1)
print("went on")
"""
    done = ended(tmp_path, fork)
    assert done.returncode == 0, done.stderr
    assert "went on" in done.stdout


def test_a_signal_during_a_fork_comes_again_after_it() -> None:
    """Python swallows what a handler raises then."""
    came = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: came.set())
    stop_signals._hold()
    StopSignals()._handle(signal.SIGTERM, None)
    stop_signals._release()
    assert came.wait(10)
    signal.signal(signal.SIGTERM, before)


def test_a_signal_during_a_print_is_told(tmp_path: Path) -> None:
    done = ended(
        tmp_path,
        """
import io, logging, os, sys
class Raw(io.RawIOBase):
    def writable(self):
        return True
    def write(self, data):
        if b"halfway" in bytes(data):
            signal.raise_signal(signal.SIGTERM)
        return os.write(2, data)
sys.stderr = io.TextIOWrapper(io.BufferedWriter(Raw()), line_buffering=True)
for handler in logging.getLogger().handlers + logging.getLogger("hubring").handlers:
    handler.setStream(sys.stderr)
print("halfway", file=sys.stderr)
step()
raise AssertionError
""",
    )
    assert done.returncode == 75, done.stderr
    assert "halfway" in done.stderr
    assert "SIGTERM: stopping after this step" in done.stderr

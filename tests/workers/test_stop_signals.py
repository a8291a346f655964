"""A script that was asked to stop and takes no more steps ends all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

RUN = """
import sys
from hubring.workers import stop_signals
from hubring.workers.programs import ps_worker
stop_signals.GRACE_SECONDS = stop_signals.STUCK_SECONDS = 0.2
sys.argv[0] = "ps-worker"
ps_worker.main()
"""
TRAIN = """
import signal, time, torch, hubring
hubring.init()
model = torch.nn.Linear(2, 1)
optimizer = hubring.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
def step():
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
for _ in range(3):
    step()
"""
TERM = "signal.raise_signal(signal.SIGTERM)\n"
EVALUATE = "for _ in range(60_000): time.sleep(0.01)\n"


def ended(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    file = folder / "script.py"
    file.write_text(TRAIN + script)
    command = [sys.executable, "-c", RUN, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_script_that_steps_no_more_ends_after_its_grace(tmp_path: Path) -> None:
    done = ended(tmp_path, TERM + EVALUATE)
    assert done.returncode == 75, done.stderr
    assert "SIGTERM: stopping after this step, or if none ends within 0 s; send it again" in done.stderr
    assert "stopped on request; no step ended within 0 s" in done.stderr


def test_a_notice_gives_all_the_time_until_sigterm(tmp_path: Path) -> None:
    done = ended(tmp_path, "signal.raise_signal(signal.SIGUSR1)\ntime.sleep(1)\n" + TERM + EVALUATE)
    assert done.returncode == 75, done.stderr
    assert "no step ended within" in done.stderr


def test_a_step_longer_than_the_grace_may_end_if_the_last_was_as_long(tmp_path: Path) -> None:
    done = ended(tmp_path, "time.sleep(1)\nstep()\n" + TERM + "time.sleep(1)\nstep()\nraise AssertionError\n")
    assert done.returncode == 75, done.stderr
    assert "stopped on request after this step" in done.stderr


def test_a_script_that_does_not_react_ends_without_its_consent(tmp_path: Path) -> None:
    deaf = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
    done = ended(tmp_path, TERM + deaf + EVALUATE)
    assert done.returncode == 75, done.stderr
    assert "the script does not react, so this process ends at once" in done.stderr

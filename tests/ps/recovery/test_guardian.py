from __future__ import annotations

import signal
import sys

import pytest

from hubring.ps.config.server import ServerConfig
from hubring.ps.core.errors import ServerUnreachable
from hubring.ps.process.child import Child
from hubring.ps.recovery import guardian
from hubring.ps.recovery.settings import Settings


def played_by(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Lets these lines of Python be the coordinator; they know both pipes and a call that reports."""

    def start(name: str, settings: Settings) -> Child:
        head = f"""
import json, os
ORDERS, REPORT = {settings.orders}, {settings.report}
def report(**result):
    os.write(REPORT, json.dumps({{"exit_code": 3, "result": result}}).encode() + b"\\n")
"""
        return Child(name, [sys.executable, "-c", head + code], pass_fds=(settings.orders, settings.report))

    monkeypatch.setattr(guardian, "start", start)


def test_the_result_is_the_coordinators(monkeypatch: pytest.MonkeyPatch) -> None:
    played_by(monkeypatch, "report(job='train.py')")
    assert guardian.guard(ServerConfig()) == guardian.Report(3, {"job": "train.py"})


def test_the_result_may_come_from_a_process_that_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    played_by(
        monkeypatch,
        """
if os.fork():
    os.kill(os.getpid(), 9)
report(job='train.py')
""",
    )
    assert guardian.guard(ServerConfig()).result == {"job": "train.py"}


def test_a_server_whose_processes_were_all_killed_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    played_by(monkeypatch, "os.kill(os.getpid(), 9)")
    with pytest.raises(ServerUnreachable, match=r"killed by signal 9 \(SIGKILL\), and so did its standby"):
        guardian.guard(ServerConfig())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_passed_on(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    played_by(
        monkeypatch, f"os.kill(os.getppid(), {number:d})\nreport(got=os.read(ORDERS, 100).decode().split())"
    )
    assert guardian.guard(ServerConfig()).result == {"got": [str(int(number))]}

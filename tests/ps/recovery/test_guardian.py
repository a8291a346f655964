from __future__ import annotations

import signal
import sys

import pytest

from hubring.ps.config.server import ServerConfig
from hubring.ps.process.child import Child
from hubring.ps.process.restarts import Restarts, supervise
from hubring.ps.recovery import guardian
from hubring.ps.recovery.guardian import CoordinatorSettings


def played_by(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Lets these lines of Python be the coordinator; they know both pipes and a call that reports."""

    def start(name: str, settings: CoordinatorSettings) -> Child:
        head = f"""
import json, os
ORDERS, REPORT = {settings.orders}, {settings.report}
def report(**result):
    os.write(REPORT, json.dumps({{"exit_code": 3, "result": result}}).encode() + b"\\n")
"""
        return Child(name, [sys.executable, "-c", head + code], pass_fds=(settings.orders, settings.report))

    monkeypatch.setattr(guardian, "start_coordinator", start)


def test_the_result_may_come_from_a_process_that_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    played_by(
        monkeypatch,
        """
if os.fork():
    os.kill(os.getpid(), 9)
report(job='train.py')
""",
    )
    assert guardian.guard(ServerConfig()) == guardian.ServerReport(3, {"job": "train.py"})


def test_a_server_whose_processes_were_all_killed_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    played_by(monkeypatch, "os.kill(os.getpid(), 9)")
    ended = guardian.guard(ServerConfig())
    assert (ended.exit_code, ended.result) == (69, {"error": ended.error, "exit_code": 69})
    assert "killed by signal 9 (SIGKILL), and so did its standby" in ended.error


def test_a_server_whose_processes_were_all_killed_is_restarted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played_by(monkeypatch, "os.kill(os.getpid(), 9)")
    ends: list[guardian.ServerReport] = []
    restarts = Restarts(2, first_pause=0.0)
    assert supervise("ps-server", lambda: guardian.Guarded(ServerConfig(), ends.append), restarts) == 69
    assert [ended.exit_code for ended in ends] == [69] * 3
    assert "ps-server: it exited with 69; restarting it in 0 s (1 left)" in capsys.readouterr().err


def test_a_server_that_was_asked_to_stop_is_not_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    played_by(
        monkeypatch,
        f"""
os.kill(os.getppid(), {signal.SIGTERM:d})
assert os.read(ORDERS, 100)
os.write(REPORT, json.dumps({{"exit_code": 75, "result": {{}}}}).encode() + b"\\n")
""",
    )
    ends: list[guardian.ServerReport] = []
    assert supervise("ps-server", lambda: guardian.Guarded(ServerConfig(), ends.append), Restarts(2)) == 75
    assert len(ends) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_passed_on(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    played_by(
        monkeypatch, f"os.kill(os.getppid(), {number:d})\nreport(got=os.read(ORDERS, 100).decode().split())"
    )
    assert guardian.guard(ServerConfig()).result == {"got": [str(int(number))]}

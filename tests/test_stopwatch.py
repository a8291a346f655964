"""The tests' own clock, and what it reads in /proc of processes that end meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.processes import stopwatch
from tests.support.processes.process_tree import below, command, entry, parent, threads


@pytest.fixture
def ended() -> int:
    """The id of a process that has ended, and whose end was waited for."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    assert process.wait() == 0
    return process.pid


def test_a_process_that_has_ended_is_nothing_to_whoever_looks(ended: int) -> None:
    assert (parent(ended), command(ended), entry(ended, "stat")) == (0, "", "")
    assert (threads(ended), below(ended)) == ([], [])
    assert parent(os.getpid()) == os.getppid()
    assert os.getpid() in threads(os.getpid())


def test_a_process_that_ends_while_the_stopwatch_looks_does_not_count(
    ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopwatch, "descendants", lambda: {ended, os.getpid()})
    watch = stopwatch.Stopwatch()
    assert os.getpid() in watch._last
    assert ended not in watch._last

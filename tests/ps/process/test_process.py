from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from subprocess import PIPE

import pytest

from hubring.ps.process.process import Adopted, Process, process


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

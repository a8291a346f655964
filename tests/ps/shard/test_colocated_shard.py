"""Where a worker's shard listens, and that it ends when it should."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hubring.ps.core.errors import ConfigError
from hubring.ps.shard import colocated
from hubring.ps.shard.colocated import Companion, place
from hubring.ps.transport.host import towards
from tests.conftest import GRACE, descendants, ends_by


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host is 10.0.0.7 for the network, and itself by loopback."""
    monkeypatch.setattr(colocated, "towards", lambda host: host if host == "127.0.0.1" else "10.0.0.7")


@pytest.mark.parametrize(
    ("dialled", "told", "here"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("10.0.0.1", "10.0.0.1", "10.0.0.7"),
        ("127.0.0.1", "10.0.0.7", "10.0.0.7"),  # the server's own host: the others come from outside
    ],
)
@pytest.mark.usefixtures("elsewhere")
def test_a_shard_listens_where_the_servers_guests_reach_it(dialled: str, told: str, here: str) -> None:
    assert place(dialled, told, insecure=here != "127.0.0.1") == here


@pytest.mark.usefixtures("elsewhere")
def test_beyond_loopback_the_server_must_have_said_that_the_network_is_trusted() -> None:
    with pytest.raises(ConfigError, match=r"10\.0\.0\.7.*start it with --host and --insecure"):
        place("10.0.0.1", "127.0.0.1", insecure=False)


def test_the_way_to_a_host_is_known_by_its_family() -> None:
    assert towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(ConfigError, match="no-such-host"):
        towards("no-such-host.invalid")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard process that only does what its parent's end of the pipe says."""
    program = [sys.executable, "-c", "import sys; sys.stdin.buffer.read(1)"]
    monkeypatch.setattr(colocated, "command", lambda settings: program)


@pytest.mark.usefixtures("stand_in")
def test_a_companion_ends_by_a_word_though_a_fork_holds_the_pipe() -> None:
    shard = Companion("hub:1", "127.0.0.1", 1, "text")
    assert shard.ended == ""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[shard._process.stdin.fileno()]):  # type: ignore[union-attr]
        shard.end()
    assert shard.ended == "exited with 0"


@pytest.mark.usefixtures("stand_in")
def test_a_companion_that_was_killed_says_so_and_ends_in_peace() -> None:
    shard = Companion("hub:1", "127.0.0.1", 1, "text")
    shard._process.kill()
    shard._process.wait()
    assert shard.ended == "was killed by signal 9"
    shard.end()


PARENT = """
import os, subprocess, sys, time
from hubring.ps.shard.spawn import Settings, command
shard = subprocess.Popen(command(Settings("127.0.0.1:9")), stdin=subprocess.PIPE)
if os.fork() == 0:  # as a DataLoader's worker would, it holds the pipe too
    while not os.path.exists(sys.argv[1]): time.sleep(0.05)
    os._exit(0)
print(shard.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_shard_ends_with_its_parent_though_a_fork_outlives_it(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with subprocess.Popen([sys.executable, "-c", PARENT, str(go)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        shard = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    assert ends_by(shard, time.monotonic() + 2 * GRACE)
    assert descendants(), "the fork is still there"
    go.touch()

"""Where a worker's shard listens, and that it ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hubring.ps.core.errors import ConfigError
from hubring.ps.process.launch import STOP_SIGNALS
from hubring.ps.shard import host_shards
from hubring.ps.shard.host_shards import ShardSettings, shard_host, start
from hubring.ps.shard.process import STOPPED
from hubring.ps.transport.host import towards
from tests.support.processes.process_tree import GRACE, descendants, ends_by


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host is 10.0.0.7 for the network, and itself by loopback."""
    monkeypatch.setattr(host_shards, "towards", lambda host: host if host == "127.0.0.1" else "10.0.0.7")


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
    assert shard_host(dialled, told) == here


@pytest.mark.usefixtures("elsewhere")
def test_a_shard_is_open_to_other_hosts_only_if_its_server_is() -> None:
    with pytest.raises(ConfigError, match=r"10\.0\.0\.7.*restart the server with --host and its host"):
        shard_host("10.0.0.1", "127.0.0.1")


def test_the_way_to_a_host_is_known_by_its_family() -> None:
    assert towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(ConfigError, match="no-such-host"):
        towards("no-such-host.invalid")


PARENT = """
import os, sys, time
from hubring.ps.shard.host_shards import ShardSettings, start
shard = start("a shard", ShardSettings("127.0.0.1:9"))
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


@pytest.mark.slow
def test_a_shard_that_still_starts_ignores_what_its_group_is_sent() -> None:
    shard = start("a shard process", ShardSettings("127.0.0.1:1"))
    for number in STOP_SIGNALS:
        shard.signal(number)
    shard.ask_to_stop()
    assert shard.wait(60.0)
    assert shard.code == STOPPED
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(STOP_SIGNALS)

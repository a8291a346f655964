"""Programs that were suspended: all agree on how the job ended, and each names its own absence."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.processes.cluster import Cluster, await_all

pytestmark = pytest.mark.slow


HURRIED = """
from hubring.ps.client import rendezvous
from tests.support.scripts import small

rendezvous.CALL_SECONDS = 2.0
small.main()
"""
"""As `small.py`, but a worker waits 2 s, not a minute, until the server has its last state."""


@pytest.mark.parametrize("wakes", [True, False])
def test_workers_that_finish_while_the_server_is_suspended_wait_for_its_verdict(
    cluster: Cluster, tmp_path: Path, wakes: bool
) -> None:
    """They do not succeed if it never acknowledges their end."""
    saved, script = tmp_path / "saved", tmp_path / "hurried.py"
    script.write_text(HURRIED)
    server, address = cluster.server("--workers", "2", "--once", "--checkpoint-dir", str(saved))
    workers = cluster.held(address, steps=22, script=str(script))
    server.process.send_signal(signal.SIGSTOP)
    cluster.go.touch()
    await_all(workers, "the server does not answer this worker, which leaves")
    server.process.send_signal(signal.SIGCONT if wakes else signal.SIGKILL)
    if not wakes:
        for worker in workers:
            assert "its last checkpoint may be missing" in worker.done(69)["error"]
        return
    assert [worker.done()["steps"] for worker in workers] == [22, 22]
    assert server.done()["finished"] == [0, 1]
    assert [path.name for path in saved.glob("[!.]*") if path.is_dir()] == ["000001-step-22"]


def test_a_last_checkpoint_that_cannot_be_written_fails_all_programs(
    cluster: Cluster, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    server, address = cluster.server("--workers", "2", "--once", "--checkpoint-dir", str(saved))
    workers = cluster.held(address, steps=22)
    (saved / f".writing-{server.process.pid}").write_text("in the way")
    cluster.go.touch()
    for worker in workers:
        assert "the last checkpoint was not written" in worker.done(78)["error"]
    assert "cannot write checkpoints" in server.done(78)["error"]


def test_a_shard_that_was_suspended_past_its_lease_says_so(cluster: Cluster) -> None:
    server, address = cluster.server("--workers", "2", "--once", "--lease", "5")
    workers = cluster.held(address, steps=22)
    (shard,) = server.children("hubring.ps.shard.process")
    os.kill(shard, signal.SIGSTOP)
    server.until_said("sent no heartbeat")
    os.kill(shard, signal.SIGCONT)
    cluster.go.touch()
    server.done(69)
    assert "this shard was suspended for about" in server.said()
    assert "Traceback" not in server.said()
    for worker in workers:
        worker.done(69)


@pytest.mark.full
def test_a_worker_that_wakes_after_its_server_ended_says_that_it_was_suspended(cluster: Cluster) -> None:
    server, address = cluster.server("--workers", "2", "--once", "--lease", "5")
    workers = cluster.held(address, steps=22)
    workers[1].process.send_signal(signal.SIGSTOP)
    workers[0].until_said("the job continues with 1 of 2 workers")
    cluster.go.touch()
    workers[0].done()
    server.done()
    workers[1].process.send_signal(signal.SIGCONT)
    error = workers[1].done(75)["error"]
    assert "this worker was suspended for about" in error
    assert "The job went on without this worker" in error

"""A new server goes on from the checkpoint of the one before."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hubring.ps.checkpoint.checkpoint_folder import read
from tests.support.processes.cluster import SMALL, Cluster, await_all

pytestmark = pytest.mark.slow


@pytest.mark.full
def test_a_resumed_job_cuts_as_the_one_before_found_best(cluster: Cluster, tmp_path: Path) -> None:
    saved, wide = tmp_path / "saved", "140000"  # 4.3 MiB: sizes make a difference
    said = []
    for steps in ("3", "5"):
        server, address = cluster.server("--once", "--checkpoint-dir", str(saved), name=f"to-{steps}")
        worker = cluster.worker(address, "--transport", "zmq", SMALL, steps, wide)
        assert worker.done()["steps"] == int(steps)
        server.done()
        said.append("gradients are sent in slices of at most" in worker.said())
    assert said == [True, False]
    first, second = (
        [(piece.key, piece.offset, piece.numel) for piece in read(folder).slices]
        for folder in sorted(saved.glob("*-step-*"))
    )
    assert len(first) > 1
    assert first == second


@pytest.mark.full
def test_shards_that_hold_nothing_leave_checkpoints_whole(cluster: Cluster, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    flags = ["--once", "--checkpoint-dir", str(saved), "--shards", "3"]
    for steps in ("10", "20"):
        server, address = cluster.server(*flags, name=f"to-{steps}")
        assert cluster.worker(address, SMALL, steps).done()["steps"] == int(steps)
        server.done()
    folders = sorted(saved.glob("*-step-*"))
    assert [read(folder).step for folder in folders] == [10, 20]
    assert all(len({piece.shard for piece in read(folder).slices}) == 1 for folder in folders)


def test_a_checkpoint_can_be_asked_for_while_the_job_runs(cluster: Cluster, tmp_path: Path) -> None:
    server, address = cluster.server("--once", "--checkpoint-dir", str(tmp_path / "saved"))
    worker = cluster.worker(address, SMALL, "1000000")
    worker.until(lambda: cluster.step(address) > 5, "a step")
    asked = cluster.run("ask", "hubring.ps.cli", "checkpoint", address).done()
    assert asked["step"] > 5
    assert (Path(asked["checkpoint"]) / "manifest.json").is_file()
    worker.process.send_signal(signal.SIGTERM)
    assert worker.done(75)["steps"] >= asked["step"]
    server.wait()


def test_merged_workers_lose_no_merge_with_a_shard_and_resume_where_they_were(
    cluster: Cluster, tmp_path: Path
) -> None:
    def losses(name: str, steps: int, *flags: str, kills: bool = False) -> list[float]:
        server, address = cluster.server("--workers", "2", "--once", *flags, name=name)
        hold = ("hold", str(tmp_path / "go"), "13") if kills else ()
        words = (SMALL, str(steps), "16", "every", "5", *hold)
        workers = cluster.ranks(address, 2, *words)
        if kills:
            await_all(workers, "holding at 13")
            os.kill(cluster.status(address)["shards"][0]["pid"], signal.SIGKILL)
            (tmp_path / "go").touch()
        ended = [worker.done() for worker in workers]
        assert [one["steps"] for one in ended] == [steps // 5] * 2
        server.done()
        return [one["metrics"]["loss"] for one in ended]

    undisturbed = losses("undisturbed", 40)
    saved = ("--checkpoint-dir", str(tmp_path / "saved"))
    losses("killed", 20, "--standby", "1", *saved, kills=True)
    assert losses("resumed", 40, *saved) == undisturbed

"""Ctrl-C drains and saves; a new server goes on from there as if nothing had been."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from hubring.ps.checkpoint.checkpoint_folder import read
from tests.support.processes.cluster import SMALL, Cluster

pytestmark = pytest.mark.slow


def train(cluster: Cluster, name: str, tmp_path: Path, shards: str, interrupted: bool) -> dict[str, Tensor]:
    saved, final, go = tmp_path / f"{name}-saved", tmp_path / f"{name}.safetensors", tmp_path / f"{name}-go"
    common = ["--workers", "2", "--once", "--slice-bytes", "128", "--checkpoint-dir", str(saved)]
    script = ["--save-parameters", str(final), SMALL, "60", "16"]
    if interrupted:
        server, address = cluster.server(*common, name=f"{name}-first")
        pair = [
            cluster.worker(
                address, "--rank", str(rank), *script, "hold", str(go), "20", name=f"{name}-a{rank}"
            )
            for rank in range(2)
        ]
        for worker in pair:
            worker.until_said("holding at 20")
        server.process.send_signal(signal.SIGINT)
        server.until_said("SIGINT")
        go.touch()
        steps = {worker.done(75)["steps"] for worker in pair}
        assert len(steps) == 1, "the workers left after different steps"
        assert server.done(130)["preempted"] == [0, 1]
    server, address = cluster.server(*common, "--shards", shards, name=f"{name}-second")
    pair = [
        cluster.worker(address, "--rank", str(rank), *script, name=f"{name}-b{rank}") for rank in range(2)
    ]
    for worker in pair:
        assert worker.done()["steps"] == 60
    server.done()
    return load_file(final)


def test_an_interrupted_run_ends_in_the_same_bytes(cluster: Cluster, tmp_path: Path) -> None:
    whole = train(cluster, "whole", tmp_path, "1", interrupted=False)
    parted = train(cluster, "parted", tmp_path, "2", interrupted=True)
    assert whole.keys() == parted.keys()
    assert all(whole[name].equal(parted[name]) for name in whole)


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


def test_a_damaged_checkpoint_is_found_out_and_the_one_before_is_used(
    cluster: Cluster, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    for steps in ("10", "20"):
        server, address = cluster.server("--once", "--checkpoint-dir", str(saved), name=f"to-{steps}")
        assert cluster.worker(address, SMALL, steps).done()["steps"] == int(steps)
        server.done()
    newest = sorted(saved.glob("*-step-20/*.safetensors"))[-1]
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    server, address = cluster.server("--once", "--checkpoint-dir", str(saved), name="third")
    server.until_said("resumes   step 10")
    assert "does not match its digest" in server.said()
    cluster.worker(address, SMALL, "20").done()
    server.done()


def test_shards_that_hold_nothing_keep_no_checkpoint_from_being_whole(
    cluster: Cluster, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    for steps in ("10", "20"):
        server, address = cluster.server(
            "--once", "--shards", "3", "--checkpoint-dir", str(saved), name=f"to-{steps}"
        )
        worker = cluster.worker(address, SMALL, steps)
        assert worker.done()["steps"] == int(steps)
        server.done()
    folders = sorted(saved.glob("*-step-*"))
    assert [read(folder).step for folder in folders] == [10, 20]
    assert all(len({piece.shard for piece in read(folder).slices}) == 1 for folder in folders)


def test_a_checkpoint_can_be_asked_for_while_the_job_runs(cluster: Cluster, tmp_path: Path) -> None:
    server, address = cluster.server("--once", "--checkpoint-dir", str(tmp_path / "saved"))
    worker = cluster.worker(address, SMALL, "1000000")
    worker.until(lambda: _steps(cluster, address) > 5, "a step")
    asked = cluster.run("ask", "hubring.ps.cli", "checkpoint", address).done()
    assert asked["step"] > 5
    assert (Path(asked["checkpoint"]) / "manifest.json").is_file()
    worker.process.send_signal(signal.SIGTERM)
    assert worker.done(75)["steps"] >= asked["step"]
    server.wait()


def _steps(cluster: Cluster, address: str) -> int:
    return max((int(shard["newest_version"]) for shard in cluster.status(address)["shards"]), default=0)

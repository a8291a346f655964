"""A hub whose store is on the GPU that its workers train on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hubring.workers.compare.run.programs import PeerPrograms
from hubring.workers.compare.run.site import LocalHosts
from hubring.workers.peers.rows import find_peer
from tests.support.processes.cluster import SCRIPTS, Cluster, Program

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]

SCRIPT = str(SCRIPTS / "on_gpu.py")


def run(cluster: Cluster, name: str, *flags: str) -> tuple[dict[str, torch.Tensor], list[Program]]:
    server, address = cluster.server("--workers", "2", "--once", *flags, name=name)
    file = cluster.folder / f"{name}.safetensors"
    pair = [cluster.worker(address, SCRIPT, "20", str(file), name=f"{name}-worker{n}") for n in range(2)]
    for worker in pair:
        worker.done()
    server.done()
    return load_file(file), pair


def test_workers_on_the_stores_gpu_send_places_and_end_where_others_do(cluster: Cluster) -> None:
    plain, through_host = run(cluster, "cpu")
    placed, pair = run(cluster, "cuda", "--device", "cuda")
    assert all("exchange stays on the GPU" in worker.said() for worker in pair)
    for name, values in plain.items():
        torch.testing.assert_close(placed[name], values)
    for worker in (*pair, *through_host):
        result = worker.result()
        assert result["device"] == "cuda"
        assert result["exchange"]["exposed_seconds"] is None, "the host does not see it"
    sent = [worker.result()["exchange"]["bytes_sent"] for worker in (*pair, *through_host)]
    assert max(sent[:2]) < min(sent[2:])


def test_workers_in_another_mode_go_through_host_memory_and_say_why(cluster: Cluster) -> None:
    _, pair = run(cluster, "asp", "--device", "cuda", "--mode", "asp")
    assert all("exchange uses host memory: in mode asp" in worker.said() for worker in pair)


def test_a_checkpoint_of_a_gpu_is_one_of_the_cpu(cluster: Cluster, tmp_path: Path) -> None:
    kept = ("--checkpoint-dir", str(tmp_path / "kept"))
    whole, _ = run(cluster, "first", "--device", "cuda", *kept)
    again, _ = run(cluster, "second", *kept)  # all steps are done: it hands the parameters back
    for name, values in whole.items():
        assert torch.equal(again[name], values)


DIGITS = ("--job", "digits", "--", "--epochs", "1")


def test_workers_train_on_their_gpu_on_a_hub_and_alone(cluster: Cluster) -> None:
    server, address = cluster.server("--workers", "2", "--once")
    workers = [cluster.worker(address, "--accelerator", "cuda", *DIGITS) for _ in range(2)]
    workers.append(cluster.run("alone", "hubring.workers.programs.ps_worker", *DIGITS))
    results = [worker.done() for worker in workers]
    server.done()
    assert [result["device"] for result in results] == ["cuda"] * 3


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero1"])
def test_a_peer_on_nccl_trains_on_the_gpu(cluster: Cluster, name: str) -> None:
    programs = PeerPrograms(find_peer(name), 1, cluster.folder, LocalHosts(), backend="nccl")
    (worker,) = programs.worker_programs(lambda _: DIGITS)
    cluster.start(name, worker.argv).done()
    assert programs.result(0)["device"] == "cuda"

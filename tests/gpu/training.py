"""Workers train on the GPU: on a hub whose store is there, and around a ring over NCCL, which heals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hubring.workers.peers.machine import gpu_variables
from tests.gpu.row import Row
from tests.support.processes.cluster import Cluster
from tests.support.scripts import loses_one
from tests.support.training.assert_trained import assert_trained

SCRIPT = str(Path(__file__).parents[1] / "support" / "scripts" / "on_gpu.py")
STEPS = 100
RANKS = 2


def train(
    cluster: Cluster,
    name: str,
    script: Sequence[str],
    server: Sequence[str] = (),
    worker: Sequence[str] = (),
    told: Sequence[Mapping[str, str]] = ({},) * RANKS,
    lost: int | None = None,
) -> list[dict[str, Any]]:
    """Workers on a server of their own; the results of those that are not lost, in rank order."""
    ranks = len(told)
    serving, address = cluster.server("--workers", str(ranks), "--once", *server, name=name)
    started = [
        cluster.run(
            f"{name}-{rank}",
            "hubring.workers.programs.ps_worker",
            *("--server", address, "--rank", str(rank), "--local-rank", str(rank)),
            *("--world-size", str(ranks), *worker, *script),
            variables=told[rank],
        )
        for rank in range(ranks)
    ]
    results = [each.done() for rank, each in enumerate(started) if rank != lost]
    serving.done()
    return results


def measured(part: str, results: Sequence[Mapping[str, Any]]) -> Row:
    """A training that came to its end."""
    steps = results[0]["steps"]
    milliseconds = 1e3 * max(result["seconds"] for result in results) / steps
    sent = max(result["exchange"]["bytes_sent"] for result in results) / steps
    said = f"{steps} steps, {milliseconds:.2f} ms and {sent:,.0f} bytes sent a step and rank"
    return Row(part, "passed", said)


def hub(cluster: Cluster) -> Row:
    """Parameters and optimizer are on the GPU."""
    file = cluster.folder / "hub.safetensors"
    return measured("hub on the GPU", train(cluster, "hub", _script(file), server=["--device", "cuda"]))


def ring(cluster: Cluster, gpus: int, environment: Mapping[str, str]) -> Row:
    """Over NCCL; it must end in the parameters of the hub, which has trained before."""
    file = cluster.folder / "ring.safetensors"
    told = [gpu_variables(rank, RANKS, gpus, environment) for rank in range(RANKS)]
    over = ["--topology", "ring", "--backend", "nccl"]
    results = train(cluster, "ring", _script(file), worker=over, told=told)
    expected = load_file(cluster.folder / "hub.safetensors")
    for name, values in load_file(file).items():
        torch.testing.assert_close(values, expected[name], rtol=1e-3, atol=1e-4)
    return measured("ring over NCCL", results)


def heals(cluster: Cluster, gpus: int, environment: Mapping[str, str], backend: str = "nccl") -> Row:
    """One of three is killed; the others end in the parameters of those that were there in each step."""
    file = cluster.folder / "heals.safetensors"
    told = [gpu_variables(rank, loses_one.SIZE, gpus, environment) for rank in range(loses_one.SIZE)]
    over = ["--topology", "ring", "--backend", backend, "--min-workers", "2"]
    script = [loses_one.__file__, str(STEPS), str(file)]
    results = train(cluster, "heals", script, worker=over, told=told, lost=loses_one.LOST)
    lost_in, width = loses_one.LOST_IN, loses_one.WIDTH
    # The members have new ranks one step after the loss.
    ranks = [[0, 1, 2]] * lost_in + [[0, 2]] + [[0, 1]] * (STEPS - lost_in - 1)
    assert_trained(file, ranks, width, rtol=1e-3, atol=1e-4)
    row = measured("ring that heals", results)
    return replace(row, measured=f"{row.measured}, a pause of {results[0]['ring']['pauses'][0]:.2f} s")


def _script(file: Path) -> list[str]:
    return [SCRIPT, str(STEPS), str(file)]

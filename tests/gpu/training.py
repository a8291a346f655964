"""Two workers train on the GPU: on a hub whose store is there, and around a ring over NCCL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hubring.workers.bench.gpus import variables
from tests.gpu.row import Row
from tests.support.processes.cluster import Cluster

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
) -> list[dict[str, Any]]:
    """Two workers on a server of their own; their results in rank order."""
    serving, address = cluster.server("--workers", str(RANKS), "--once", *server, name=name)
    pair = [
        cluster.run(
            f"{name}-{rank}",
            "hubring.workers.programs.ps_worker",
            *("--server", address, "--rank", str(rank), "--local-rank", str(rank)),
            *("--world-size", str(RANKS), *worker, *script),
            variables=told[rank],
        )
        for rank in range(RANKS)
    ]
    results = [each.done() for each in pair]
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
    told = [variables(rank, RANKS, gpus, environment) for rank in range(RANKS)]
    over = ["--topology", "ring", "--backend", "nccl"]
    results = train(cluster, "ring", _script(file), worker=over, told=told)
    expected = load_file(cluster.folder / "hub.safetensors")
    for name, values in load_file(file).items():
        torch.testing.assert_close(values, expected[name], rtol=1e-3, atol=1e-4)
    return measured("ring over NCCL", results)


def _script(file: Path) -> list[str]:
    return [SCRIPT, str(STEPS), str(file)]

"""One experiment over two tasks whose ring and torch's own rows exchange over NCCL, with its gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hubring.workers.peers.machine import gpu_variables
from tests.gpu.row import Row
from tests.support.compare.anywhere import results
from tests.support.processes.cluster import Cluster

ROWS = ("ring", "ddp", "fsdp2", "zero1", "hub-bsp", "hub-colocated")
TASKS, LIMIT = 2, 400.0
"""Number of tasks, and seconds for a comparison of six rows, whose processes each open the GPU."""


def run(
    cluster: Cluster,
    gpus: int,
    environment: Mapping[str, str],
    backend: str = "nccl",
    rows: tuple[str, ...] = ROWS,
) -> list[Row]:
    """Compares; a line of the table for every row."""
    out = cluster.folder / "compared"
    variables = {"WORLD_SIZE": str(TASKS), "LOCAL_WORLD_SIZE": str(TASKS), "MASTER_ADDR": "127.0.0.1"}
    asked = ("--rows", ",".join(rows), "--seeds", "1", "--epochs", "3", "--backend", backend)
    tasks = [
        cluster.run(
            f"task {rank}",
            "hubring.workers.compare.cli",
            *("run", "--job", "digits", *asked, "--out", str(out)),
            variables=variables
            | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            | gpu_variables(rank, TASKS, gpus, environment),
        )
        for rank in range(TASKS)
    ]
    ended = [task.wait(LIMIT) for task in tasks]
    assert (out / "results.json").exists(), f"the tasks exited with {ended}:\n{tasks[0].said()}"
    return entries(results(out))


def entries(found: Mapping[str, Any]) -> list[Row]:
    """The rows of a comparison; if its gate did not pass, all of them have failed."""
    passed = found["gate"]["passed"]
    return [
        Row(
            f"comparison, {row['row']}",
            "passed" if passed and not row["failed"] else "failed",
            row["failed"] or f"{_step(row)}, gate {'passed' if passed else 'failed'}",
        )
        for row in found["rows"]
    ]


def _step(row: Mapping[str, Any]) -> str:
    step = row["numbers"]["step_ms"]
    return f"step not shown: {row['withheld']}" if step is None else f"{step['median']:.2f} ms a step"

"""Runs all that needs a GPU, and prints one table of it: `python -m tests.gpu`, or `make gpu`."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import torch

from tests.gpu import bench, comparison, pytests, training
from tests.gpu.row import Row, exit_code, table
from tests.support.processes.cluster import Cluster

NO_DEVICE = 69


def attempt(part: str, run: Callable[[], list[Row]]) -> list[Row]:
    """The rows of a part; where it raises, one that says why, and the traceback on standard error."""
    try:
        return run()
    except Exception as error:
        traceback.print_exc()
        return [Row(part, "failed", (str(error) or type(error).__name__).splitlines()[0])]


def run(folder: Path) -> list[Row]:
    """Every part, whatever became of those before."""
    cluster, gpus = Cluster(folder), torch.cuda.device_count()
    parts: dict[str, Callable[[], list[Row]]] = {
        "tests marked gpu": lambda: [pytests.run("tests marked gpu", pytests.MARKED)],
        "scripts on the GPU": lambda: [pytests.run("scripts on the GPU", pytests.SCRIPTS)],
        "hub on the GPU": lambda: [training.hub(cluster)],
        "ring over NCCL": lambda: [training.ring(cluster, gpus, os.environ)],
        "ring that heals": lambda: [training.heals(cluster, gpus, os.environ)],
        "comparison": lambda: comparison.run(cluster, gpus, os.environ),
        "bench": lambda: bench.run(folder),
    }
    try:
        return [row for part, action in parts.items() for row in attempt(part, action)]
    finally:
        cluster.end()


def main() -> int:
    """Returns 1 if a part failed, and 69 where there is no GPU."""
    if not torch.cuda.is_available():
        print("make gpu: torch finds no CUDA device here; nothing was run", file=sys.stderr)
        return NO_DEVICE
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        rows = run(Path(folder))
    print(table(rows))
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())

"""The bench's rows that use a GPU, as parts of the table."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hubring.workers.bench.row import ROWS
from tests.gpu.row import Row

CASES = "2:flat:sgd,2:resnet50:sgd"


def run(folder: Path) -> list[Row]:
    """Runs them; one line of the table for each case."""
    out = folder / "bench.json"
    on_gpu = ",".join(row.name for row in ROWS.values() if row.device == "cuda")
    words = ["--cases", CASES, "--rows", on_gpu, "--out", str(out)]
    command = [sys.executable, "-m", "hubring.workers.programs.ps_worker", "bench", *words]
    ended = subprocess.run(command, stdout=sys.stderr, check=False)
    assert out.exists(), f"ps-worker bench exited with {ended.returncode}"
    return entries(json.loads(out.read_text()))


def entries(found: Iterable[Mapping[str, Any]]) -> list[Row]:
    """What the bench's file holds; a row that came out wrong has failed."""
    return [
        Row(
            f"bench {each['row']}, {each['n']}:{each['shape']}:{each['optimizer']}",
            "failed" if each["wrong"] else "passed",
            f"{each['median_ms']:.2f} ms, {each['busbw']:.2f} GB/s, {each['wrong']} wrong",
        )
        for each in found
    ]

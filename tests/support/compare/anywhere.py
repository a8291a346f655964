"""One experiment file, and what its report must hold wherever the experiment ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.processes.cluster import MEASURED

ROWS = ("ring", "hub-bsp", "ddp")
STEPS = 60
PATIENT = 400.0
"""Seconds for a comparison, whose dozen processes each import torch, also on a busy machine."""


def write_experiment(folder: Path) -> Path:
    """Writes the experiment file, and beside it its script."""
    lines = Path(MEASURED).read_text().splitlines(keepends=True)
    script = "".join(line for line in lines if "spare_compiler" not in line)  # DDP needs torch's compiler
    (folder / "train.py").write_text(script)
    experiment = folder / "mine.toml"
    experiment.write_text(
        f'script = "train.py"\narguments = ["{STEPS}", "{{seed}}"]\nmetric = "fit"\nrising = false\n'
        f"rows = {json.dumps(ROWS)}\nseeds = [1]\n"
    )
    return experiment


def reported(out: Path) -> dict[str, Any]:
    """Returns the findings, after a look at what does not depend on where the experiment ran."""
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    assert found["gate"]["passed"]
    assert [(row["row"], row["withheld"], row["failed"]) for row in found["rows"]] == [
        (row, None, None) for row in ROWS
    ]
    assert {pair["second"] for pair in found["gate"]["pairs"]} == {"hub-bsp", "ddp", "hub-bsp again"}
    assert all(each["judged"] > 0 and not each["fault"] for each in found["gate"]["steps"])
    assert {line["wrong"] for line in found["bandwidth"]} <= {0, None}
    page = (out / "report.html").read_text()
    assert all(row in page for row in ROWS)
    assert all(host in page for host in found["machine"].get("hosts", ()))
    return found

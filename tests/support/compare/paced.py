"""Comparisons whose speeds a test sets, and the verdict on them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hubring.workers.compare.experiment.plan import Run
from hubring.workers.compare.run.outcome import Line
from tests.support.compare.replayed import Replayed, compared, record

SEEDS = (0, 1, 2)
CALM = (1.0, 1.02, 0.98)
"""Small differences between seeds, the same in all rows."""


def paced(
    steps: dict[str, float],
    noise: Mapping[str, tuple[float, ...]] | None = None,
    waits: dict[str, float] | None = None,
) -> Replayed:
    """Returns rows with these seconds per step (default 10 ms) and of waiting (default 5 ms)."""

    def records(run: Run) -> list[Line]:
        name = run.row.name
        factors = (noise or {}).get(name, CALM)
        exposed = (waits or {}).get(name, 0.005)
        return record(steps.get(name, 0.01) * factors[run.seed], pause=0.0, exposed=exposed)

    return Replayed(records=records)


def verdict(folder: Path, trainer: Replayed, **changes: Any) -> str:
    found: list[str] = compared(folder, trainer, **{"seeds": SEEDS, **changes})["verdict"]
    return "\n".join(found)

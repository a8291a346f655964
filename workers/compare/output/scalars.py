"""TensorBoard scalars: one folder per run, with its curves by step."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from hubring.ps.core.extras import missing
from hubring.workers.compare.run.outcome import Outcome


def lack() -> str:
    """Returns why `write` writes nothing; empty if it does."""
    text = missing("tensorboardX")
    return f"no TensorBoard scalars: {text}" if text else ""


def write(folder: Path, outcomes: Iterable[Outcome], metric: str) -> None:
    """Writes what every rank 0 reported: `loss`, `test_loss` and the metric; nothing without tensorboardX.

    Args:
        folder: Replaced if it exists.
        outcomes: The runs.
        metric: Key of the metric.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if lack():
        return
    from tensorboardX import SummaryWriter  # late: an extra

    for outcome in outcomes:
        began = datetime.fromisoformat(outcome.began).timestamp()
        with SummaryWriter(str(folder / outcome.run.label)) as writer:
            for line in outcome.records[0]:
                for name in {"loss", "test_loss", metric} & line.keys():
                    writer.add_scalar(name, line[name], line["step"], began + line["seconds"])

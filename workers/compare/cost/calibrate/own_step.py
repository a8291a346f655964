"""Measures a job's step in one process, without exchange."""

from __future__ import annotations

import json
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

from hubring.ps.core.errors import DeadlineExceeded, HubringError
from hubring.ps.process.command import module_command
from hubring.workers.compare.experiment.job import find
from hubring.workers.compare.run import machine
from hubring.workers.compare.run.process import Process, ProcessFailed
from hubring.workers.compare.run.runner import clean_environment

EPOCHS = 2
TIMEOUT = 120.0
"""Seconds."""


def own_step(job: str) -> tuple[float, float, float]:
    """Returns the seconds of a step: median, lower and upper quartile.

    Args:
        job: A built-in job.

    Raises:
        UsageError: There is no such job.
        ProcessFailed: The job failed.
        DeadlineExceeded: The job took too long.
        HubringError: The job took too few steps.
    """
    find(job)
    with tempfile.TemporaryDirectory(prefix="calibrate-") as directory:
        record = Path(directory) / "record.jsonl"
        words = ["--job", job, "--record", str(record), "--", "--epochs", str(EPOCHS)]
        environment = clean_environment(machine.cores())
        process = Process(
            job, module_command("hubring.workers.programs.ps_worker", *words), Path(directory), environment
        )
        try:
            if not process.wait(TIMEOUT):
                raise DeadlineExceeded(
                    f"{job} took longer than {TIMEOUT:g} s for {EPOCHS} epochs; calibrate without --job, and"
                    " set --compute in predict"
                )
        finally:
            process.end(0.0)
        if process.code:
            raise ProcessFailed(f"{job} {process.ended}; its error output:\n{process.err.read_text()}")
        return _middle([json.loads(line) for line in record.read_text().splitlines()])


def _middle(record: list[dict[str, float]]) -> tuple[float, float, float]:
    """Uses only steps that follow a step; after a measurement of the model, its time would be included."""
    steps = [
        after["seconds"] - before["seconds"]
        for before, after in pairwise(record)
        if "samples" in before and "samples" in after
    ]
    if len(steps) < 4:
        raise HubringError(f"the job took {len(steps)} steps in {EPOCHS} epochs; expected at least 4")
    low, _, high = quantiles(steps)
    return median(steps), low, high

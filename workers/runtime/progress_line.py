"""The line that shows how far rank 0 is, for the `ps-run` that started it at a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from hubring.ps.job.telemetry import Completion, StepRate, reported_progress


class ProgressLine:
    """Writes the line to a file, which `ps-run` reads: so it is in no copy of the worker's output.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._step = path, 0
        self._steps, self._samples, self._completion = StepRate(), StepRate(), Completion()

    def note(self, step: int, samples: int, reported: Mapping[str, Any], now: float) -> None:
        """Replaces the line, unless no step was completed: a prompt of the script stays visible.

        Args:
            step: Completed steps.
            samples: Training samples that rank 0 reported so far.
            reported: The last value of each metric.
            now: Monotonic seconds.
        """
        if step == self._step:
            return
        self._step = step
        self._steps.note(step, now)
        self._samples.note(samples, now)
        self._completion.note(reported_progress(reported, step), now)
        total, loss = reported.get("total_steps"), reported.get("loss")
        left = self._completion.seconds_left(now)
        parts = [f"step {step}" + ("" if total is None else f" of {total}")]
        if self._samples.rate:
            parts.append(f"{self._samples.rate:.4g} samples/s")
        elif self._steps.rate:
            parts.append(f"{self._steps.rate:.3g} steps/s")
        parts += [f"loss {loss:.4g}"] if isinstance(loss, int | float) else []
        parts += [] if left is None else [f"{timedelta(seconds=round(left))} left"]
        self._path.write_text(", ".join(parts))

"""Writes what rank 0 reports to TensorBoard or Weights & Biases: `--report-to`.

Law: a missing package is an error before training. An error of the writer ends the writing, with one warning,
and never the training.

The writer opens with the first report: its step is known then, and may be that of a resumed job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hubring.ps.core.packages import require
from hubring.ps.job.telemetry import StepRate

log = logging.getLogger(__name__)

FLUSH_SECONDS = 10
_NO_CURVES = {"samples", "total_steps", "progress"}
"""`samples` becomes `samples_per_second`."""


def require_writer(destination: str | None) -> None:
    """Checks that the package that writes to the value of `--report-to` is installed.

    Raises:
        ConfigError: It is not.
    """
    if destination is not None:
        require(destination.partition(":")[0], f"--report-to {destination}")


def in_any_folder(destination: str | None) -> str | None:
    """Returns the value of `--report-to` with an absolute path, unless it is no path of this host."""
    kind, _, place = (destination or "").partition(":")
    return f"{kind}:{Path(place).absolute()}" if kind == "tensorboard" and "://" not in place else destination


class MetricExport:
    """Writes the numbers of reports, by training step.

    Args:
        destination: `tensorboard:FOLDER` or `wandb:PROJECT`.
    """

    def __init__(self, destination: str) -> None:
        self._destination = destination
        self._writer: _TensorBoard | _WandB | None = None
        self._failed = False
        self._samples = StepRate()

    def write(self, step: int, metrics: Mapping[str, Any], samples: int, now: float) -> None:
        """Writes one report.

        Args:
            step: Completed steps.
            metrics: Values by name. Text and None are left out.
            samples: Training samples that this rank reported so far.
            now: Monotonic seconds.
        """
        self._samples.note(samples, now)
        numbers = {
            name: value
            for name, value in metrics.items()
            if isinstance(value, int | float) and name not in _NO_CURVES
        }
        if "samples" in metrics and self._samples.rate:
            numbers["samples_per_second"] = self._samples.rate
        if numbers:
            self._attempt(lambda: self._opened(step).write(step, numbers))

    def close(self, *, finished: bool) -> None:
        """Writes what is left. `finished` is false after an error."""
        if (writer := self._writer) is not None:
            self._attempt(lambda: writer.close(finished=finished))
        elif finished and not self._failed:
            log.warning("--report-to %s: no metric was reported; call hubring.report", self._destination)

    def _opened(self, step: int) -> _TensorBoard | _WandB:
        if self._writer is None:
            kind, _, place = self._destination.partition(":")
            self._writer = _TensorBoard(place, step) if kind == "tensorboard" else _WandB(place)
        return self._writer

    def _attempt(self, write: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            write()
        except Exception as error:
            self._failed = True
            why = str(error) or type(error).__name__
            log.warning("--report-to %s: %s; training continues without it", self._destination, why)


class _TensorBoard:
    def __init__(self, folder: str, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # late: an extra

        # TensorBoard hides what an earlier run of the job wrote from this step on. Not at step 0: a resumed
        # job may report before its first step.
        self._writer = SummaryWriter(folder, purge_step=step or None, flush_secs=FLUSH_SECONDS)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, finished: bool) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, project: str) -> None:
        import wandb  # late: an extra

        # WANDB_RUN_ID continues that run. W&B drops steps that it has.
        self._run = wandb.init(project=project, resume="allow")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)

"""What disturbed an experiment's runs, and by how much equal runs differ."""

from __future__ import annotations

import math
from statistics import fmean, stdev

from msgspec import Struct


class Load(Struct, frozen=True):
    """Median and maximum of a load of the machine, over all runs."""

    median: float | None = None
    max: float | None = None


class Repeat(Struct, frozen=True):
    """The row that ran twice with each seed; `ratios` are the second runs' speeds by the first runs'."""

    setting: str
    row: str
    ratios: list[float]


class Noise(Struct, frozen=True):
    """Noise of the measurements.

    Attributes:
        load: The 1-minute load.
        foreign: Share of the machine that other programs used.
        stolen: Share of the machine that its hypervisor gave to other machines.
        stalled: Share of the time in which a program waited for memory.
        spread: Range of each row's step times over the seeds, relative to their median.
        repeat: The row that ran twice; None if it did not finish.
        quiet: No run was disturbed.
        said: What disturbed runs, in sentences.
        gpus: Whether runs used GPUs. Nothing tells what disturbs these.
    """

    load: Load = Load()
    foreign: Load | None = None
    stolen: Load | None = None
    stalled: Load | None = None
    spread: dict[str, float | None] = {}
    repeat: Repeat | None = None
    quiet: bool = True
    said: list[str] = []
    gpus: bool = False

    @property
    def summary(self) -> str:
        """Whether anything disturbed the runs, in a sentence."""
        found = "Nothing disturbed the runs" if self.quiet else "Some runs were disturbed"
        return (
            f"{found}, as far as processors and memory show; GPUs were not watched."
            if self.gpus
            else f"{found}."
        )

    @property
    def floor(self) -> float:
        """The ratio by which equal rows differ here: the mean of the repeats, or two standard errors."""
        logs = [math.log(each) for each in self.repeat.ratios] if self.repeat else []
        error = stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
        return math.exp(max(abs(fmean(logs)) if logs else 0.0, 2 * error))

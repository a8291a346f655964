"""The plan: an experiment's runs in a fair order. Pure.

Law: runs that are compared are close in time and take turns in going first. There is one pass for each
seed and repeat. A pass runs every row of every setting once; the rows of a setting follow each other.
From pass to pass the rows rotate by one place, and every other pass visits the settings backward. So a
machine that warms up or is busy for a while does not slow one row alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hubring.workers.compare.experiment.experiment import Experiment
from hubring.workers.compare.experiment.row import Row
from hubring.workers.compare.experiment.setting import Setting

AGAIN = "hub-bsp"
"""The row that runs a second time with the first seed: the parameters must be identical bit by bit."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training.

    Attributes:
        setting: The part of the setting that affects the row (`Row.meets`).
        row: The row.
        seed: Seed of the job.
        turn: Number among the runs with the same setting, row and seed.
    """

    setting: Setting
    row: Row
    seed: int
    turn: int = 0

    @property
    def label(self) -> str:
        """Name of the run and of its folder."""
        turn = f" turn{self.turn}" if self.turn else ""
        return f"{self.setting.key} {self.row.name} seed{self.seed}{turn}"


def runs(experiment: Experiment) -> list[Run]:
    """Returns all runs in order, without duplicates."""
    passes = [(seed, turn) for turn in range(experiment.repeats) for seed in experiment.seeds]
    found: dict[Run, None] = {}
    for number, (seed, turn) in enumerate(passes):
        found |= dict.fromkeys(_pass(experiment, number, seed, turn))
        if number == 0:
            found |= dict.fromkeys(_again(experiment))
    return list(found)


def counted(experiment: Experiment, setting: Setting, row: Row, seed: int) -> list[Run]:
    """Returns the runs that make up the numbers of a row in a setting with a seed."""
    return [Run(row.meets(setting), row, seed, turn) for turn in range(experiment.repeats)]


def again(experiment: Experiment) -> tuple[Run, Run] | None:
    """Returns the two hub runs that must be identical bit by bit; None without such a row."""
    setting = experiment.settings[0]
    first = [Run(setting, row, experiment.seeds[0]) for row in experiment.ways if row.name == AGAIN]
    if not first or setting.fault is not None:
        return None
    return first[0], Run(setting, first[0].row, experiment.seeds[0], turn=1)


def _again(experiment: Experiment) -> list[Run]:
    pair = again(experiment)
    return [] if pair is None else [pair[1]]


def _pass(experiment: Experiment, number: int, seed: int, turn: int) -> Iterator[Run]:
    settings = experiment.settings[:: -1 if number % 2 else 1]
    rows = _rotated(experiment.ways, number)
    for setting in settings:
        for row in rows:
            yield Run(row.meets(setting), row, seed, turn)


def _rotated(rows: Sequence[Row], places: int) -> list[Row]:
    cut = places % len(rows)
    return [*rows[cut:], *rows[:cut]]

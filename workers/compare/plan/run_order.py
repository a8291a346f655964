"""The plan: an experiment's runs in a fair order, and the command that resumes them.

Law: runs that are compared are close in time and take turns in going first. There is one pass for each
seed and repeat. A pass runs every row of every setting once; the rows of a setting follow each other.
From pass to pass the rows rotate by one place, and every other pass visits the settings backward. So a
machine that warms up or is busy for a while does not slow one row alone. Disturbed runs are run again at
the end, if they are at most a quarter of all.
"""

from __future__ import annotations

import shlex
import sys
from itertools import product
from pathlib import Path

from msgspec import Struct

from hubring.workers.compare.plan.experiment import Experiment
from hubring.workers.compare.plan.row import Row
from hubring.workers.compare.plan.setting import Setting
from hubring.workers.runtime.slowdown import SlowdownSettings

AGAIN = "hub-bsp"
"""The row that runs a second time, if the experiment has it: the parameters must be identical bit by bit."""


class PlannedRun(Struct, frozen=True):
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

    @property
    def slowness(self) -> SlowdownSettings:
        """How long its workers sleep in a step."""
        processes = self.row.workers(self.setting.workers)
        return SlowdownSettings(self.setting.straggler, self.setting.compute_of(processes), self.seed)


def runs(experiment: Experiment) -> list[PlannedRun]:
    """Returns all runs in order, without duplicates."""
    rows, found = experiment.ways, dict[PlannedRun, None]()
    repeated = {run.seed: run for _, run in again(experiment)}
    for number, (turn, seed) in enumerate(product(range(experiment.repeats), experiment.seeds)):
        settings, first = experiment.settings[:: -1 if number % 2 else 1], number % len(rows)
        for setting, row in product(settings, rows[first:] + rows[:first]):
            found[PlannedRun(row.meets(setting), row, seed, turn)] = None
        if turn == 0 and seed in repeated:
            found[repeated[seed]] = None
    return list(found)


def counted(experiment: Experiment, setting: Setting, row: Row, seed: int) -> list[PlannedRun]:
    """Returns the runs that make up the numbers of a row in a setting with a seed."""
    return [PlannedRun(row.meets(setting), row, seed, turn) for turn in range(experiment.repeats)]


def again(experiment: Experiment) -> list[tuple[PlannedRun, PlannedRun]]:
    """Returns two runs of the same row for each seed, in the first setting; none if that has a fault.

    They show by how much equal rows differ on this machine. The row is hub-bsp, else the first with
    several workers, if there is a row to compare it with.
    """
    setting, rows = experiment.settings[0], experiment.ways
    row = next((row for row in rows if row.name == AGAIN), None)
    if row is None and len(rows) > 1:
        row = next(row for row in rows if row.name != "local")
    if row is None or setting.fault is not None:
        return []
    met = row.meets(setting)
    return [(PlannedRun(met, row, seed), PlannedRun(met, row, seed, turn=1)) for seed in experiment.seeds]


def typed() -> str:
    """Returns the command line of this process."""
    return shlex.join(["ps-compare", *sys.argv[1:]])


def resume_command(command: str, folder: Path) -> str:
    """Returns the command that resumes a comparison in `folder`.

    Args:
        command: The command that began the comparison, with or without `--out`.
        folder: The folder of its runs.
    """
    rest, words = [], iter(shlex.split(command))
    for word in words:
        if word == "--out":
            next(words, None)
        elif not word.startswith("--out="):
            rest.append(word)
    return shlex.join([*rest, "--out", str(folder)])

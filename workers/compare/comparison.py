"""One comparison, from an experiment to its folder, whenever and however often it is started.

    experiment.json    what was asked for, and on what machine
    calibration.json   what the machine can do, measured before the first run
    runs/LABEL/        what the programs of a run wrote; with `outcome.json` it is finished for good
    results.json       all that was found (`hubring.workers.compare.result.findings`)
    report.html        the same as a page
    mllog.txt          as MLPerf's `:::MLLOG` lines
    tensorboard/       as TensorBoard's scalars
    lock               held by whoever is at work in the folder

The folder can be copied; nothing in it names the place where it was made but the commands.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.command import going_on
from hubring.workers.compare.cost.model.constants import Constants, read
from hubring.workers.compare.experiment.experiment import Experiment
from hubring.workers.compare.experiment.plan import Run, runs
from hubring.workers.compare.judge.measure import measure
from hubring.workers.compare.judge.results import results
from hubring.workers.compare.output import mllog, scalars
from hubring.workers.compare.page import page
from hubring.workers.compare.result.findings import Findings
from hubring.workers.compare.result.load_results import decode, encode
from hubring.workers.compare.run import machine, noise, outcome
from hubring.workers.compare.run.outcome import Line, Outcome, write_whole

FILE = "experiment.json"
CALIBRATION = "calibration.json"
LOCK = "lock"
_MAY_DIFFER = {"timeout", "tolerance", "about", "name"}
"""What changes nothing that was measured."""


class _Begun(Struct, frozen=True):
    """What `experiment.json` holds."""

    experiment: Experiment
    machine: dict[str, Any]
    command: str


class Watcher(Protocol):
    """Whoever shows how it goes; all runs by label."""

    def progress(self, run: str, line: Line) -> None:
        """Rank 0's latest report; called a few times a second."""

    def finished(self, run: str) -> None:
        """A run has ended."""

    def kept(self, run: str) -> None:
        """A run was finished before, and is not repeated."""

    def warn(self, text: str) -> None:
        """Something to mind."""


class Trainer(Protocol):
    """What runs one training: `hubring.workers.compare.run.runner.Runner`."""

    def busy(self) -> list[str]:
        """The names of the machines that are not at rest before the first run."""

    def run(self, run: Run, folder: Path, progress: Callable[[Line], None]) -> Outcome:
        """Trains once in a folder that is made anew, and writes its outcome last."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """An experiment and its folder.

    Attributes:
        experiment: What to compare.
        folder: Where everything is written.
        command: What the user typed.
        machine: What it runs on, or ran on.
    """

    experiment: Experiment
    folder: Path
    command: str
    machine: dict[str, Any]

    @classmethod
    def begin(
        cls, experiment: Experiment, folder: Path, command: str, on: dict[str, Any] | None = None
    ) -> Comparison:
        """Takes up a folder: a new one, or one in which the same experiment was begun.

        Args:
            experiment: What to compare.
            folder: Where.
            command: What the user typed.
            on: What it runs on; None: this machine.

        Raises:
            UsageError: The folder holds another experiment, or was begun elsewhere; names what differs.
        """
        here = on or dict(machine.describe())
        if (folder / FILE).is_file():
            there = cls.open(folder)
            _check_same(there.experiment, experiment, folder)
            _check_same_site(there.machine, here, folder)
            if there.experiment == experiment:
                return there
            here = there.machine
        folder.mkdir(parents=True, exist_ok=True)
        content = msgspec.json.encode(_Begun(experiment, here, command), enc_hook=str)
        write_whole(folder / FILE, msgspec.json.format(content, indent=1))
        return cls(experiment, folder, command, here)

    @classmethod
    def open(cls, folder: Path) -> Comparison:
        """The comparison that lies in a folder.

        Raises:
            UsageError: There is none.
        """
        try:
            begun = msgspec.json.decode(
                (folder / FILE).read_bytes(), type=_Begun, dec_hook=lambda kind, value: kind(value)
            )
            return cls(begun.experiment, folder, begun.command, begun.machine)
        except OSError as cause:
            raise UsageError(f"{folder} holds no experiment: it has no {FILE}") from cause
        except (msgspec.DecodeError, UsageError) as cause:
            raise UsageError(f"{folder / FILE} is no experiment of this version: {cause}") from cause

    def judged_by(self, tolerance: float) -> Comparison:
        """The same with another tolerance, for its report: what was run does not depend on it.

        Raises:
            UsageError: The tolerance is not above 0.
        """
        if not tolerance > 0:
            raise UsageError(f"--tolerance {tolerance:g}: expected a number above 0")
        experiment = msgspec.structs.replace(self.experiment, tolerance=tolerance)
        return replace(self, experiment=experiment, command=f"{self.command} --tolerance {tolerance:g}")

    def place(self, run: Run) -> Path:
        """Folder of a run."""
        return self.folder / "runs" / run.label

    @property
    def missing(self) -> list[Run]:
        """Runs that are not finished."""
        return [run for run in runs(self.experiment) if not outcome.finished(self.place(run))]

    def run(
        self, trainer: Trainer, watcher: Watcher, calibrate: Callable[[], Constants] | None = None
    ) -> Findings:
        """Runs what is not finished, then judges, measures and writes the rest of the folder.

        Args:
            trainer: Runs one.
            watcher: Shows how it goes.
            calibrate: Measures what the machine can do; None: nothing is predicted, as on a cluster.

        Returns:
            What was found.

        Raises:
            ProcessFailed: A row's process failed, but not by diverging.
            DeadlineExceeded: A row took too long.
            HubringError: What a run left, now or before, cannot be measured.
            UsageError: Another program is at work in the folder.
        """
        with _alone_in(self.folder):
            for name in trainer.busy():
                watcher.warn(f"{name} is not idle: other programs disturb what is measured")
            if calibrate is not None and not (self.folder / CALIBRATION).exists():
                calibrate().write(self.folder / CALIBRATION)
            self._check_kept(watcher)
            for run in runs(self.experiment):
                if outcome.finished(self.place(run)):
                    watcher.kept(run.label)
                    continue
                left = trainer.run(run, self.place(run), partial(watcher.progress, run.label))
                try:
                    measure(left, self.experiment.yardstick)
                except Exception:  # told at once, and run again when its script has been mended
                    outcome.discard(self.place(run))
                    raise
                watcher.finished(run.label)
                if left.diverged:
                    watcher.warn(f"{run.label} {left.failed}")
                if (left.noise.foreign or 0.0) > noise.FOREIGN:
                    watcher.warn(f"{run.label}: other programs took {left.noise.foreign:.0%} of the machine")
            return self.report()

    def report(self) -> Findings:
        """Writes everything that follows from the outcomes; trains nothing.

        Raises:
            UsageError: A run is not finished.
            HubringError: A record holds nothing to measure, or what was found is not finite; the
                `results.json` of before stays.
        """
        outcomes = {run.label: self._outcome(run) for run in runs(self.experiment)}
        known = self.folder / CALIBRATION
        # The constants of one machine say nothing of what joins several.
        constants = read(known) if known.exists() and "launcher" not in self.machine else None
        job, warmup = self.experiment.yardstick, self.experiment.warmup
        numbers = {label: measure(each, job, warmup) for label, each in outcomes.items()}
        made = results(self.experiment, outcomes, numbers, self.machine, self.command, constants)
        text = encode(made)
        found = decode(text)  # what is read later is what is shown now
        write_whole(self.folder / "results.json", text)
        write_whole(self.folder / "report.html", page(found))
        measured = [(each, numbers[label]) for label, each in outcomes.items() if each.records[0]]
        write_whole(self.folder / "mllog.txt", mllog.log(self.experiment, measured))
        scalars.write(self.folder / "tensorboard", outcomes.values(), job.metric)
        return found

    def _check_kept(self, watcher: Watcher) -> None:
        """What was finished before and cannot be measured is told now, not after hours of what is missing."""
        kept = [run for run in runs(self.experiment) if outcome.finished(self.place(run))]
        for run in kept:
            measure(self._outcome(run), self.experiment.yardstick)
        script = self.experiment.script
        if script is not None and script.is_file():
            changed = script.stat().st_mtime
            older = [run.label for run in kept if outcome.finished_at(self.place(run)) < changed]
            if older:
                watcher.warn(
                    f"{script.name} was changed after {older[0]}, one of {len(older)} finished runs that are"
                    " kept: where that matters, give another --out, and all are run with it as it is now"
                )

    def _outcome(self, run: Run) -> Outcome:
        if not outcome.finished(self.place(run)):
            raise UsageError(f"{run.label} is not finished; to go on: {going_on(self.command, self.folder)}")
        return outcome.read(self.place(run), run)


def _check_same(there: Experiment, asked: Experiment, folder: Path) -> None:
    before, now = (json.loads(msgspec.json.encode(each, enc_hook=str)) for each in (there, asked))
    differing = [
        f"{name} was {before[name]!r} and is now {now[name]!r}"
        for name in now
        if before[name] != now[name] and name not in _MAY_DIFFER
    ]
    if differing:
        raise UsageError(
            f"{folder} holds another experiment: {'; '.join(differing)};"
            " ask for the same, or give another --out"
        )


def _check_same_site(there: Mapping[str, Any], here: Mapping[str, Any], folder: Path) -> None:
    """Numbers from different machines, or of different versions, are not to be compared."""
    if any(there.get(name) != here.get(name) for name in ("launcher", "hosts")):
        raise UsageError(
            f"{folder} was begun on {machine.name_site(there)}, and this is {machine.name_site(here)}: go on"
            " there, or give another --out"
        )
    differing = [
        f"{name} was {there.get(name)} and is now {here.get(name)}"
        for name in machine.DECIDING
        if there.get(name) != here.get(name)
    ]
    if differing:
        raise UsageError(
            f"{folder} was begun elsewhere, or with other packages: {'; '.join(differing)}; go on there, or"
            " give another --out"
        )


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    with (folder / LOCK).open("a") as file:  # a file of its own: the others are replaced when rewritten
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            raise UsageError(f"another ps-compare is at work in {folder}: give another --out") from cause
        yield

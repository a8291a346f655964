"""One comparison: an experiment and its folder. It can be interrupted and resumed.

    experiment.json    the experiment and the machine
    calibration.json   the machine's constants, measured before the first run
    runs/LABEL/        output of a run's programs; a run with `outcome.json` is finished
    results.json       all results (`hubring.workers.compare.findings`)
    report.html        the results as a page
    mllog.txt          the results as MLPerf `:::MLLOG` lines
    tensorboard/       the results as TensorBoard scalars
    lock               locked by the process that works in the folder

The folder can be copied: only the recorded commands contain its path.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from hubring.ps.core.errors import DeadlineExceeded, UsageError
from hubring.workers.compare.decide.results import results
from hubring.workers.compare.findings import Findings, decode, encode
from hubring.workers.compare.measure import check, measure, price
from hubring.workers.compare.plan.experiment import Experiment
from hubring.workers.compare.plan.run_order import PlannedRun, resume_command, runs
from hubring.workers.compare.predict.calibrations import Constants, read_constants
from hubring.workers.compare.run import outcome
from hubring.workers.compare.run.outcome import RunOutcome, write_whole
from hubring.workers.compare.run.runner import Runner
from hubring.workers.compare.show import exports
from hubring.workers.compare.show.page import page
from hubring.workers.compare.show.screen import RunScreen
from hubring.workers.peers import machine
from hubring.workers.peers.processes import ProcessFailed

FILE = "experiment.json"
CALIBRATION = "calibration.json"
LOCK = "lock"
MOST_REPEATED = 0.25
"""Share of an experiment's runs that are repeated if they were disturbed."""
_MAY_DIFFER = {"timeout", "tolerance", "about", "name"}
"""Fields that change no measurement."""


class _Begun(Struct, frozen=True):
    """Content of `experiment.json`."""

    experiment: Experiment
    machine: dict[str, Any]
    command: str


class Comparison(Struct, frozen=True):
    """An experiment and its folder.

    Attributes:
        experiment: What to compare.
        folder: The output folder.
        command: The command that the user typed.
        machine: The machine of the runs.
    """

    experiment: Experiment
    folder: Path
    command: str
    machine: dict[str, Any]

    @classmethod
    def begin(
        cls, experiment: Experiment, folder: Path, command: str, on: dict[str, Any] | None = None
    ) -> Comparison:
        """Opens a new folder, or one in which the same experiment was begun.

        Args:
            experiment: What to compare.
            folder: The output folder.
            command: The command that the user typed.
            on: The machine of the runs; None: this machine.

        Raises:
            UsageError: The folder holds another experiment or was begun on another machine.
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
        """Opens the comparison in a folder.

        Raises:
            UsageError: The folder holds no comparison.
        """
        try:
            begun = msgspec.json.decode(
                (folder / FILE).read_bytes(), type=_Begun, dec_hook=lambda kind, value: kind(value)
            )
            return cls(begun.experiment, folder, begun.command, begun.machine)
        except OSError as cause:
            raise UsageError(f"{folder} has no {FILE}, so it holds no experiment") from cause
        except (msgspec.DecodeError, UsageError) as cause:
            raise UsageError(f"{folder / FILE} is not an experiment of this version: {cause}") from cause

    def judged_by(self, tolerance: float) -> Comparison:
        """Returns this comparison with another tolerance for its report. The runs do not depend on it.

        Raises:
            UsageError: The tolerance is not above 0.
        """
        if not tolerance > 0:
            raise UsageError(f"--tolerance {tolerance:g}: expected a number above 0")
        experiment = msgspec.structs.replace(self.experiment, tolerance=tolerance)
        return replace(self, experiment=experiment, command=f"{self.command} --tolerance {tolerance:g}")

    def place(self, run: PlannedRun) -> Path:
        """Returns the folder of a run."""
        return self.folder / "runs" / run.label

    @property
    def missing(self) -> list[PlannedRun]:
        """Runs that are not finished."""
        return [run for run in runs(self.experiment) if not outcome.finished(self.place(run))]

    def run(
        self, runner: Runner, screen: RunScreen, calibrate: Callable[[], Constants] | None = None
    ) -> Findings:
        """Runs what is not finished, then judges, measures and writes the other files of the folder.

        Args:
            runner: Runs one training.
            screen: Shows progress.
            calibrate: Measures the machine's constants; None: no predictions, as on a cluster or with NCCL.

        Returns:
            The findings.

        Raises:
            ProcessFailed: A process failed for another reason than divergence, in a row's first run. If a
                later run fails, the row's other runs count.
            DeadlineExceeded: A row's first run took too long.
            HubringError: The output of a run cannot be measured.
            UsageError: Another process works in the folder.
        """
        with _alone_in(self.folder):
            for name in runner.busy() if self.missing else ():
                screen.warn(f"{name} is not idle; other programs disturb the measurements")
            if calibrate is not None and not (self.folder / CALIBRATION).exists():
                calibrate().write(self.folder / CALIBRATION)
            self._check_finished(screen)
            for run in runs(self.experiment):
                if outcome.finished(self.place(run)):
                    screen.skipped(run.label)
                    continue
                self._run(run, runner, screen)
            self._repeat_disturbed(runner, screen)
            return self.report(screen.checking)

    def _run(self, run: PlannedRun, runner: Runner, screen: RunScreen) -> RunOutcome:
        try:
            left = runner.run(run, self.place(run), partial(screen.progress, run.label))
        except (ProcessFailed, DeadlineExceeded) as cause:
            if "launcher" in self.machine or not self._finished_otherwise(run):
                raise
            screen.warn(f"{cause}\nThe other runs count; to repeat it, delete {self.place(run)}")
            left = outcome.crash(run, self.place(run), str(cause))
        try:
            check(left, self.experiment.yardstick)
        except Exception:  # without its outcome the run is repeated once the script is fixed
            outcome.discard(self.place(run))
            raise
        screen.finished(run.label)
        if left.diverged:
            screen.warn(f"{run.label} {left.failed}")
        for disturbance in filter(None, (each.disturbance() for each in left.noise)):
            screen.warn(f"{run.label}: {disturbance}")
        return left

    def _repeat_disturbed(self, runner: Runner, screen: RunScreen) -> None:
        """Runs what was disturbed once more, unless so much was that a repeat would be disturbed too.

        The first run counts if its repeat crashes or is interrupted.
        """
        ended = {run.label: self._outcome(run) for run in runs(self.experiment)}
        found = outcome.disturbed(ended)
        if len(found) > len(ended) * MOST_REPEATED:
            return
        script = outcome.digest(self.experiment.script)
        for label, why in found.items():
            first = ended[label]
            if first.instead_of or first.script != script:
                continue
            screen.again(label)
            second = None
            with TemporaryDirectory(dir=self.folder) as kept:
                place, aside = self.place(first.run), Path(kept, "run")
                place.rename(aside)
                try:
                    second = self._run(first.run, runner, screen)
                except (ProcessFailed, DeadlineExceeded) as cause:
                    screen.warn(str(cause))
                finally:
                    if second is None or (second.failed and not first.failed):
                        shutil.rmtree(place, ignore_errors=True)
                        aside.rename(place)
                    else:
                        replace(second, instead_of=why).write()

    def _finished_otherwise(self, run: PlannedRun) -> bool:
        """Whether the row has finished here with another seed, so that its script is not at fault."""
        rest = [each for each in runs(self.experiment) if (each.setting, each.row) == (run.setting, run.row)]
        return any(outcome.finished(self.place(each)) and not self._outcome(each).failed for each in rest)

    def report(self, checking: Callable[[str], None] = lambda _: None) -> Findings:
        """Writes everything that follows from the outcomes; trains nothing.

        Args:
            checking: Called with the label of each run before its steps are judged.

        Raises:
            UsageError: A run is not finished.
            HubringError: A record holds nothing to measure, or a result is not finite. An existing
                `results.json` is not changed.
        """
        outcomes = {run.label: self._outcome(run) for run in runs(self.experiment)}
        known = self.folder / CALIBRATION
        # The constants of one machine do not predict a cluster.
        constants = read_constants(known) if known.exists() and "launcher" not in self.machine else None
        job, warmup = self.experiment.yardstick, self.experiment.warmup
        numbers = {label: measure(each, job, warmup) for label, each in outcomes.items()}
        if (prices := self.experiment.prices) is not None:
            for label, each in outcomes.items():
                numbers[label] |= price(each.run, numbers[label], prices, self.experiment.epochs)
        made = results(self.experiment, outcomes, numbers, self.machine, self.command, constants, checking)
        text = encode(made)
        found = decode(text)  # the page and the terminal show what `results.json` holds
        write_whole(self.folder / "results.json", text)
        write_whole(self.folder / "report.html", page(found))
        measured = [(each, numbers[label]) for label, each in outcomes.items() if each.records[0]]
        write_whole(self.folder / "mllog.txt", exports.write_mllog(self.experiment, measured))
        exports.write_scalars(self.folder / "tensorboard", outcomes.values(), job.metric)
        return found

    def _check_finished(self, screen: RunScreen) -> None:
        """Fails on a finished run that cannot be measured, before hours of other runs."""
        script, older = self.experiment.script, list[str]()
        now = outcome.digest(script)
        for run in runs(self.experiment):
            if outcome.finished(self.place(run)):
                left = self._outcome(run)
                check(left, self.experiment.yardstick)
                older += [run.label] if now and left.script not in ("", now) else []
        if script is not None and older:
            screen.warn(
                f"{script.name} changed after {older[0]}, one of {len(older)} finished runs that are not"
                " repeated; to run all with the changed script, use another --out"
            )

    def _outcome(self, run: PlannedRun) -> RunOutcome:
        if not outcome.finished(self.place(run)):
            command = resume_command(self.command, self.folder)
            raise UsageError(f"{run.label} is not finished; to resume, run: {command}")
        return outcome.read(self.place(run), run)


def _check_same(there: Experiment, asked: Experiment, folder: Path) -> None:
    before, now = (json.loads(msgspec.json.encode(each, enc_hook=str)) for each in (there, asked))
    if differing := _differing(before, now, [name for name in now if name not in _MAY_DIFFER], "{!r}"):
        raise UsageError(
            f"{folder} holds another experiment: {differing}. Run the same experiment, or use another --out"
        )


def _check_same_site(there: Mapping[str, Any], here: Mapping[str, Any], folder: Path) -> None:
    """Checks the machine and the versions: numbers of different ones are not comparable."""
    if any(there.get(name) != here.get(name) for name in ("launcher", "hosts")):
        raise UsageError(
            f"{folder} was begun on {machine.name_site(there)}, and this is {machine.name_site(here)}."
            " Resume there, or use another --out"
        )
    if differing := _differing(there, here, machine.DECIDING, "{}"):
        raise UsageError(
            f"{folder} was begun on another machine or with other versions: {differing}."
            " Resume there, or use another --out"
        )


def _differing(there: Mapping[str, Any], here: Mapping[str, Any], names: Iterable[str], form: str) -> str:
    """Returns which of these values differ; empty if none does."""
    both = {name: (there.get(name), here.get(name)) for name in names}
    said = f"{{}} was {form} and is now {form}"
    return "; ".join(said.format(name, old, new) for name, (old, new) in both.items() if old != new)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    with (folder / LOCK).open("a") as file:  # a separate file: rewriting replaces the others
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            raise UsageError(f"another ps-compare is running in {folder}; use another --out") from cause
        yield

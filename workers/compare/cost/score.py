"""The score: predictions beside what was measured, and how far they are apart where nothing was fitted.

Of each row the first plain setting in which it was measured calibrates what the job takes beside its
exchange (`fitted_overhead.py`): it is marked so and does not count. All else of that row
is predicted; a row that nothing calibrated is not, since the model lacks the job's own part of its step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from msgspec.structs import replace

from hubring.workers.compare.cost.fitted_overhead import Overhead
from hubring.workers.compare.cost.measured import Point, points
from hubring.workers.compare.cost.model.constants import Constants
from hubring.workers.compare.cost.model.crossing import overtaking
from hubring.workers.compare.cost.prediction import Forecast, Job, predict
from hubring.workers.compare.cost.row_case import Reading, read
from hubring.workers.compare.experiment.row import EVERY
from hubring.workers.compare.experiment.setting import Setting
from hubring.workers.compare.result.findings import Accuracy, Entry, Prediction, Scaling

BEYOND = 4
"""How many times the workers that were measured the scaling is predicted for."""


class Score:
    """The model, calibrated by one experiment's first measurements and compared with the others.

    Args:
        settings: Of the experiment.
        rows: What was measured in them.
        constants: Of the machine or cluster that it ran on.
        job: What was trained. Its `compute` is what the first measurements say.
    """

    def __init__(
        self, settings: Iterable[Setting], rows: Iterable[Entry], constants: Constants, job: Job
    ) -> None:
        self._constants = constants
        self._job = job
        self._points = points(settings, rows)
        self._calibrating = _calibrating(self._points)
        self._overheads = self._solve()
        self._batch = _batch(self._calibrating)

    @property
    def calibrated(self) -> set[str]:
        """The rows of which the model knows what the job takes beside its exchange."""
        return set(self._overheads)

    def predictions(self) -> list[Prediction]:
        """Each row that is calibrated, beside what was measured of it."""
        return [self._beside(point) for point in _distinct(self._points) if point.row in self._overheads]

    @staticmethod
    def accuracy(predictions: Iterable[Prediction]) -> Accuracy | None:
        """How far these are off where nothing was calibrated; None where all was."""
        errors = [abs(each.error) for each in predictions if each.error is not None and not each.calibrated]
        return Accuracy(fmean(errors), len(errors)) if errors else None

    def scaling(self) -> list[Scaling]:
        """Samples a second over the number of workers, all else as in each row's first setting."""
        return [self._scaling(first) for first in self._calibrating]

    def predict(self, reading: Reading, setting: Setting) -> Forecast:
        """A row's step in any setting, as calibrated."""
        workers = 1 if reading.alone else setting.workers
        overhead = self._overheads.get(reading.name, Overhead(0.0))
        batch = None if self._batch is None else self._batch / workers
        job = replace(self._job, compute=overhead.of(workers), batch=batch)
        return predict(self._constants, reading, setting, job)

    def crossover(self, setting: Setting) -> int | None:
        """From how many servers on hub-bsp's step is predicted to be shorter than the ring's.

        Args:
            setting: All else is as there.
        """
        ring, hub = read("ring"), read("hub-bsp")

        def step(servers: int) -> float:
            return self.predict(hub, replace(setting, servers=servers)).step_seconds

        return overtaking(step, self.predict(ring, setting).step_seconds, setting.workers)

    # Calibrating.

    def _solve(self) -> dict[str, Overhead]:
        """Each row's overhead; a process alone tells what of the others' shrinks with their share."""
        cores = self._constants.cores if self._job.together else 0
        rest = {point.row: self._rest(point) for point in self._calibrating}
        alone = next((rest[point.row] for point in self._calibrating if point.reading.alone), None)
        return {
            point.row: Overhead.solve(rest[point.row], point.workers, cores, alone)
            for point in self._calibrating
        }

    def _rest(self, point: Point) -> float:
        """What its step takes beside the exchange and emulated computing."""
        computing = point.compute_seconds
        if computing is not None:
            slept = point.setting.compute_of(1 if point.reading.alone else point.setting.workers)
            computing = max(0.0, computing - (slept or 0.0))
        job = replace(self._job, compute=computing or 0.0)
        foreseen = predict(self._constants, point.reading, point.setting, job)
        link = point.setting.link
        wired = link is not None and link.rate is not None and not self._job.together
        links = foreseen.links if wired else 0.0
        return Overhead.rest(point.step_seconds, foreseen.step_seconds, computing, links)

    def _beside(self, point: Point) -> Prediction:
        predicted = self.predict(point.reading, point.setting)
        return Prediction(
            setting=point.key,
            row=point.row,
            measured_ms=1e3 * point.step_seconds,
            predicted_ms=1e3 * predicted.step_seconds,
            error=predicted.step_seconds / point.step_seconds - 1,
            calibrated=point in self._calibrating,
            by=predicted.by,
        )

    def _scaling(self, first: Point) -> Scaling:
        speeds = {
            point.setting.workers: point.samples_per_second
            for point in self._points
            if point.row == first.row
            and point.setting == replace(first.setting, workers=point.setting.workers)
        }
        counts = sorted(speeds.keys() | _doublings(BEYOND * max(speeds)))
        settings = [replace(first.setting, workers=count) for count in counts]
        predicted = [self.predict(first.reading, setting).samples_per_second for setting in settings]
        return Scaling(first.row, counts, [speeds.get(count) for count in counts], predicted)


def _distinct(found: Sequence[Point]) -> list[Point]:
    """One point for each run: a ring's, which no number of servers changes, stands in many settings."""
    runs: dict[tuple[str, Setting], Point] = {}
    for point in found:
        runs.setdefault((point.row, _met(point)), point)
    return list(runs.values())


def _met(point: Point) -> Setting:
    return EVERY[point.row].meets(point.setting) if point.row in EVERY else point.setting


def _calibrating(found: Sequence[Point]) -> list[Point]:
    """The first plain point of each row."""
    firsts: dict[str, Point] = {}
    for point in found:
        if point.plain:
            firsts.setdefault(point.row, point)
    return list(firsts.values())


def _batch(found: Sequence[Point]) -> float | None:
    """Samples that all workers take in one step together; in lockstep that is speed times step.

    None where no row in lockstep was measured.
    """
    batches = [
        point.samples_per_second * point.step_seconds
        for point in found
        if point.samples_per_second is not None and point.reading.rule in ("ring", "bsp")
    ]
    return batches[0] if batches else None


def _doublings(most: int) -> set[int]:
    counts, count = set(), 1
    while count <= most:
        counts.add(count)
        count *= 2
    return counts

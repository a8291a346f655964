"""The score: predictions, measurements, and their error where nothing was fitted.

For each row, its first plain setting calibrates what the job takes besides its exchange
(`fitted_overhead.py`). That prediction is marked as calibrated and does not count. Everything else of the row
is predicted. A row without calibration is not predicted, because the model lacks the job's part of its step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from msgspec.structs import replace

from hubring.workers.compare.cost.fitted_overhead import Overhead
from hubring.workers.compare.cost.measured import Point, points
from hubring.workers.compare.cost.model.constants import Constants
from hubring.workers.compare.cost.model.crossing import overtaking
from hubring.workers.compare.cost.prediction import SEEDS, Forecast, Job, predict
from hubring.workers.compare.cost.row_case import Reading, read
from hubring.workers.compare.experiment.row import meets
from hubring.workers.compare.experiment.setting import Setting
from hubring.workers.compare.result.findings import Accuracy, Entry, Prediction, Scaling

BEYOND = 4
"""Factor by which predictions of scaling exceed the measured workers."""


class Score:
    """The model, calibrated by an experiment's first measurements and compared with the others.

    Args:
        settings: Of the experiment.
        rows: Measured in these settings.
        constants: Of the machine or cluster of the runs.
        job: What was trained. Its `compute` is replaced by what the first measurements show.
        seeds: Seeds of the runs, whose random delays are known; empty: others.
    """

    def __init__(
        self,
        settings: Iterable[Setting],
        rows: Iterable[Entry],
        constants: Constants,
        job: Job,
        seeds: Sequence[int] = (),
    ) -> None:
        self._seeds = tuple(seeds) or tuple(range(SEEDS))
        self._constants = constants
        self._job = job
        self._points = points(settings, rows)
        self._calibrating = _calibrating(self._points)
        self._overheads = self._solve()
        self._batch = _batch(self._calibrating)

    @property
    def calibrated(self) -> set[str]:
        """Rows whose job time besides the exchange is known."""
        return set(self._overheads)

    def predictions(self) -> list[Prediction]:
        """Returns each calibrated row's predictions with the measurements."""
        return [self._beside(point) for point in _distinct(self._points) if point.row in self._overheads]

    @staticmethod
    def accuracy(predictions: Iterable[Prediction]) -> Accuracy | None:
        """Returns the error of these where nothing was calibrated; None if all were calibrated."""
        errors = [abs(each.error) for each in predictions if each.error is not None and not each.calibrated]
        return Accuracy(fmean(errors), len(errors)) if errors else None

    def scaling(self) -> list[Scaling]:
        """Returns samples per second by workers, otherwise in each row's first setting.

        Rows of one process are not in it.
        """
        return [self._scaling(first) for first in self._calibrating if not first.reading.alone]

    def predict(self, reading: Reading, setting: Setting) -> Forecast:
        """Returns a row's predicted step in any setting, with calibration."""
        workers = 1 if reading.alone else setting.workers
        overhead = self._overheads.get(reading.name, Overhead(0.0))
        batch = None if self._batch is None else self._batch / workers
        job = replace(self._job, compute=overhead.of(workers), batch=batch)
        return predict(self._constants, reading, setting, job, seeds=self._seeds)

    def crossover(self, setting: Setting) -> int | None:
        """Returns from how many servers hub-bsp's step is predicted to be shorter than the ring's.

        Args:
            setting: The setting, apart from its servers.
        """
        ring, hub = read("ring"), read("hub-bsp")

        def step(servers: int) -> float:
            return self.predict(hub, replace(setting, servers=servers)).step_seconds

        return overtaking(step, self.predict(ring, setting).step_seconds, setting.workers)

    # Calibration.

    def _solve(self) -> dict[str, Overhead]:
        """Returns each row's overhead; a single process shows what shrinks with a worker's share."""
        cores = self._constants.cores if self._job.together else 0
        rest = {point.row: self._rest(point) for point in self._calibrating}
        alone = next((rest[point.row] for point in self._calibrating if point.reading.alone), None)
        return {
            point.row: Overhead.solve(rest[point.row], point.workers, cores, alone)
            for point in self._calibrating
        }

    def _rest(self, point: Point) -> float:
        """Returns the time of a step besides exchange and emulated compute."""
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
            predicted_ms=1e3 * predicted.median_seconds,
            error=predicted.median_seconds / point.step_seconds - 1,
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
        counts = [count for count in counts if count > first.reading.backup]
        settings = [replace(first.setting, workers=count) for count in counts]
        predicted = [self.predict(first.reading, setting).samples_per_second for setting in settings]
        return Scaling(first.row, counts, [speeds.get(count) for count in counts], predicted)


def _distinct(found: Sequence[Point]) -> list[Point]:
    """Returns one point per run: a ring's run counts in several settings that differ in servers."""
    runs: dict[tuple[str, Setting], Point] = {}
    for point in found:
        runs.setdefault((point.row, meets(point.row, point.setting)), point)
    return list(runs.values())


def _calibrating(found: Sequence[Point]) -> list[Point]:
    """Returns the first plain point of each row."""
    firsts: dict[str, Point] = {}
    for point in found:
        if point.plain:
            firsts.setdefault(point.row, point)
    return list(firsts.values())


def _batch(found: Sequence[Point]) -> float | None:
    """Returns the samples of one step of all workers; in lockstep that is speed times step.

    None if no row in lockstep was measured.
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

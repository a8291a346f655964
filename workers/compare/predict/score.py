"""The score: predictions, measurements, and their error where nothing was fitted.

Constants do not determine a step's forward and backward, Python's overhead and recording. So each row's first
measurement in a plain setting determines them. That prediction is marked as calibrated and does not count.
The row's other settings are predicted. A row without calibration is not predicted, because the model lacks
the job's part of its step.

The job's part is what remains of the step beyond the exchange that the formula predicts. One machine
emulates all hosts, so its cores move the bytes of all links, whatever the number of servers: with one server
and 4 workers, 39 ms remained for 17 MB behind 200 Mbit/s and 108 ms for 34 MB behind 1 Gbit/s, two to three
ms per MB although the wire was five times faster.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from statistics import fmean

from msgspec import Struct
from msgspec.structs import replace

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.findings import Accuracy, Findings, Prediction, RowResult, Scaling
from hubring.workers.compare.plan.experiment import Experiment
from hubring.workers.compare.plan.row import ROWS, Row, meets
from hubring.workers.compare.plan.setting import Setting, grouped
from hubring.workers.compare.predict.calibrations import Constants
from hubring.workers.compare.predict.exchange_terms import overtaking
from hubring.workers.compare.predict.prediction import Forecast, PredictedJob, predict, read_row
from hubring.workers.compare.predict.slicing import tensors


class MeasuredPoint(Struct, frozen=True):
    """One row in one setting.

    Attributes:
        setting: The setting.
        row: The row as the model knows it.
        step_seconds: Median.
        samples_per_second: Of all workers; None: not measured.
        compute_seconds: Mean part of a step that does not wait for exchange; None: not measured.
    """

    setting: Setting
    row: Row
    step_seconds: float
    samples_per_second: float | None
    compute_seconds: float | None = None

    @property
    def plain(self) -> bool:
        """Whether the setting has neither straggler nor fault."""
        return self.setting.straggler is None and self.setting.fault is None

    @property
    def alone(self) -> bool:
        """Whether the row has one process."""
        return self.row.rule is None

    @property
    def workers(self) -> int:
        return 1 if self.alone else self.setting.workers


def points(settings: Iterable[Setting], rows: Iterable[RowResult]) -> list[MeasuredPoint]:
    """Returns the measurements in the rows' order, without rows that are withheld or have no model."""
    known, found = {each.key: each for each in settings}, list[MeasuredPoint]()
    for row in rows:
        step, compute = row.median("step_ms"), row.median("compute_ms")
        if row.withheld or step is None:
            continue
        with suppress(UsageError):  # there is no model of the row
            found.append(
                MeasuredPoint(
                    setting=known[row.setting],
                    row=read_row(row.row),
                    step_seconds=step / 1e3,
                    samples_per_second=row.median("samples_per_second"),
                    compute_seconds=None if compute is None else compute / 1e3,
                )
            )
    return found


def model_bytes(settings: Iterable[Setting], rows: Iterable[RowResult]) -> int | None:
    """Returns the bytes of the trained model, from what a worker sends to a hub or around a ring.

    None if no row that is shown exchanged anything.
    """
    workers = {each.key: each.workers for each in settings}
    for row in rows:
        shown = row.exact and not row.withheld
        sent, n = row.median("bytes_sent_per_step") if shown else None, workers[row.setting]
        if sent and row.row.startswith("hub-"):
            return round(sent)
        if sent and row.row == "ring" and n > 1:
            return round(sent * n / (2 * (n - 1)))
    return None


class Overhead(Struct, frozen=True):
    """Seconds a step and worker, by number of workers.

    Attributes:
        fixed: Of every worker, whatever its share of the batch.
        batch: Of the whole batch; each of n workers has 1/n of it.
        cores: Number of cores that all hosts share.
    """

    fixed: float
    batch: float
    cores: int

    def of(self, workers: int) -> float:
        """Returns the seconds of a step besides its exchange."""
        return max(1.0, workers / self.cores) * (self.fixed + self.batch / workers)

    @staticmethod
    def solve(rest: float, workers: int, cores: int, alone: float | None) -> Overhead:
        """Returns the overhead from the remainder of one row's step.

        Args:
            rest: Seconds of the step without the exchange.
            workers: Number of workers.
            cores: As the attribute.
            alone: The remainder of one process with the whole batch; None: unknown, so no part of `rest`
                shrinks with the share.
        """
        each = max(0.0, rest) / max(1.0, workers / cores)
        if alone is None or workers == 1:
            return Overhead(each, 0.0, cores)
        # alone = fixed + batch, each = fixed + batch / workers
        batch = min(max(0.0, (alone - each) / (1 - 1 / workers)), each * workers)
        return Overhead(each - batch / workers, batch, cores)


BEYOND = 4
"""Factor by which predictions of scaling exceed the measured workers."""


class Score:
    """The model, calibrated by an experiment's first measurements and compared with the others.

    Args:
        found: What was measured. The random delays of the runs follow from their seeds.
        constants: Of the machine or cluster of the runs.
        job: What was trained. Its `compute` is replaced by what the first measurements show.
    """

    def __init__(self, found: Findings, constants: Constants, job: PredictedJob) -> None:
        self._seeds, self._constants, self._job = found.asked.seeds, constants, job
        self._points = points(found.settings, found.rows)
        # The first plain point of each row.
        self._calibrating = _firsts((point.row.name, point) for point in self._points if point.plain)
        cores, rest = constants.cores, [(point, self._rest(point)) for point in self._calibrating]
        # A single process shows what shrinks with a worker's share.
        alone = next((seconds for point, seconds in rest if point.alone), None)
        self._overheads = {
            point.row.name: Overhead.solve(seconds, point.workers, cores, alone) for point, seconds in rest
        }
        # The samples of one step of all workers; in lockstep that is speed times step.
        batches = (
            point.samples_per_second * point.step_seconds
            for point in self._calibrating
            if point.samples_per_second is not None and point.row.rule in ("ring", "bsp")
        )
        self._batch = next(batches, None)

    @property
    def calibrated(self) -> set[str]:
        """Rows whose job time besides the exchange is known."""
        return set(self._overheads)

    def predictions(self) -> list[Prediction]:
        """Returns each calibrated row's predictions with the measurements, but for runs with a fault."""
        # One point per run: a ring's run counts in several settings that differ in servers.
        known = [point for point in self._points if point.row.name in self._overheads]
        met = [(meets(point.row.name, point.setting), point) for point in known]
        runs = _firsts(((point.row.name, each), point) for each, point in met if each.fault is None)
        return [self._beside(point) for point in runs]

    @staticmethod
    def accuracy(predictions: Iterable[Prediction]) -> Accuracy | None:
        """Returns the error of these where nothing was calibrated; None if all were calibrated."""
        errors = [abs(each.error) for each in predictions if each.error is not None and not each.calibrated]
        return Accuracy(fmean(errors), len(errors)) if errors else None

    def scaling(self) -> list[Scaling]:
        """Returns samples per second by workers, otherwise in each row's first setting.

        Rows of one process are not in it.
        """
        return [self._scaling(first) for first in self._calibrating if not first.alone]

    def predict(self, row: Row, setting: Setting) -> Forecast:
        """Returns a row's predicted step in any setting, with calibration."""
        workers = 1 if row.rule is None else setting.workers
        overhead = self._overheads.get(row.name)
        compute = 0.0 if overhead is None else overhead.of(workers)
        batch = None if self._batch is None else self._batch / workers
        job = replace(self._job, compute=compute, batch=batch)
        return predict(self._constants, row, setting, job, seeds=self._seeds)

    def crossover(self, setting: Setting) -> int | None:
        """Returns from how many servers hub-bsp's step is predicted to be shorter than the ring's.

        Args:
            setting: The setting, apart from its servers.
        """

        def hub(servers: int) -> float:
            return self.predict(ROWS["hub-bsp"], replace(setting, servers=servers)).step_seconds

        return overtaking(hub, self.predict(ROWS["ring"], setting).step_seconds, setting.workers)

    def _rest(self, point: MeasuredPoint) -> float:
        """Returns the time of a step besides exchange and emulated compute."""
        slept = point.setting.compute_of(point.workers) or 0.0
        computing = max(0.0, (point.compute_seconds or 0.0) - slept)
        job = replace(self._job, compute=computing)
        foreseen = predict(self._constants, point.row, point.setting, job).step_seconds
        return computing + point.step_seconds - foreseen

    def _beside(self, point: MeasuredPoint) -> Prediction:
        predicted = self.predict(point.row, point.setting)
        return Prediction(
            setting=point.setting.key,
            row=point.row.name,
            measured_ms=1e3 * point.step_seconds,
            predicted_ms=1e3 * predicted.median_seconds,
            error=predicted.median_seconds / point.step_seconds - 1,
            calibrated=point in self._calibrating,
            by=predicted.by,
        )

    def _scaling(self, first: MeasuredPoint) -> Scaling:
        speeds = {
            point.setting.workers: point.samples_per_second
            for point in self._points
            if point.row == first.row
            and point.setting == replace(first.setting, workers=point.setting.workers)
        }
        doublings = {1 << power for power in range((BEYOND * max(speeds)).bit_length())}
        counts = sorted(count for count in speeds.keys() | doublings if count > first.row.backup)
        settings = [replace(first.setting, workers=count) for count in counts]
        predicted = [self.predict(first.row, setting).samples_per_second for setting in settings]
        return Scaling(first.row.name, counts, [speeds.get(count) for count in counts], predicted)


def _firsts(found: Iterable[tuple[Hashable, MeasuredPoint]]) -> list[MeasuredPoint]:
    """Returns the first point with each key."""
    firsts: dict[Hashable, MeasuredPoint] = {}
    for key, point in found:
        firsts.setdefault(key, point)
    return list(firsts.values())


def scaling(settings: Sequence[Setting], rows: Sequence[RowResult]) -> list[Scaling]:
    """Returns samples per second by workers, from the first settings that differ only in workers.

    `local` has one process whatever the setting, so it is not in it.
    """
    group = next((group for group in grouped(settings, "workers") if len(group) > 1), [])
    if not group:
        return []
    speeds = {(row.setting, row.row): row.median("samples_per_second") for row in rows}
    return [
        Scaling(
            row=name,
            workers=[setting.workers for setting in group],
            measured=[speeds.get((setting.key, name)) for setting in group],
            predicted=[None] * len(group),
        )
        for name in dict.fromkeys(row.row for row in rows if row.row != "local")
    ]


OPTIMIZERS = {"char-lm": "adam"}
"""Optimizers of built-in jobs that do not use SGD."""


def calibrated(found: Findings, constants: Constants | None) -> Score | None:
    """Returns the model, calibrated by the measured findings; None if nothing can be predicted.

    Args:
        found: The measured findings.
        constants: Of the machine or cluster of the runs; None: not measured. They are of Gloo, so runs with
            NCCL are not predicted.
    """
    nbytes = model_bytes(found.settings, found.rows)
    if constants is None or nbytes is None or found.asked.backend == "nccl":
        return None
    return Score(found, constants, trained(found.asked, nbytes))


def predicted(found: Findings, model: Score | None) -> Findings:
    """Returns the measured findings with `predictions`, `score` and `scaling`."""
    scales = scaling(found.settings, found.rows)
    if model is None:
        return replace(found, scaling=scales)
    predictions = model.predictions()
    return replace(
        found,
        predictions=predictions,
        score=model.accuracy(predictions),
        scaling=[*model.scaling(), *(each for each in scales if each.row not in model.calibrated)],
    )


def trained(experiment: Experiment, model_bytes: int) -> PredictedJob:
    """Returns what was trained, and the transport."""
    return PredictedJob(
        nbytes=model_bytes,
        optimizer=OPTIMIZERS.get(experiment.job or "", "sgd"),
        wire="" if experiment.transport == "auto" else experiment.transport,
        together=True,
        slice_bytes=experiment.slice_bytes,
        tensors=tensors(experiment.job, model_bytes),
    )

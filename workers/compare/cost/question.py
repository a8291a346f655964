"""The question of `ps-compare predict`, and its answer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.cost.calibrations import link_of
from hubring.workers.compare.cost.model.constants import Constants
from hubring.workers.compare.cost.model.crossing import most_servers, overtaking, servers_needed
from hubring.workers.compare.cost.prediction import Forecast, Job, predict
from hubring.workers.compare.cost.row_case import Reading, read
from hubring.workers.compare.experiment import quantity
from hubring.workers.compare.experiment.setting import Link, Setting
from hubring.workers.compare.result.nccl_tests import busbw
from hubring.workers.slowdown.straggler import Straggler

ROWS = "local,ring,hub-bsp,hub-ssp,hub-asp"
GPU_ROWS = "nccl,nccl-ring,nccl-tree,nccl-two-level"
"""Rows of a calibration with GPUs, unless others are asked for."""
KINDS = ("constant", "pareto", "host")
MODELS = {"digits": 39720, "mlp": 100306848, "resnet50": 102228128}
"""Bytes of the models with these names in `ps-worker bench`."""


class Answered(Struct, frozen=True, kw_only=True):
    """A prediction for the last line: `Forecast` in milliseconds, with its row and setting.

    `step_ms` is the mean step of a worker, `range_ms` the means of the fastest and the slowest seed; None
    without random delays. `busbw` is that of nccl-tests in GB/s; None for rows of another library.
    """

    row: str
    workers: int
    servers: int | None
    step_ms: float
    median_ms: float
    range_ms: tuple[float, float] | None
    samples_per_second: float | None
    efficiency: float
    by: str
    bound: str
    extrapolated: bool
    finished: bool
    busbw: float | None
    parts_ms: dict[str, float]


class Crossing(Struct, frozen=True, kw_only=True):
    """The number of servers from which the hub beats the ring; None: no number up to `most_servers`."""

    workers: int
    by_bytes: int | None
    predicted: int | None
    most_servers: int


class Answer(Struct, frozen=True, kw_only=True):
    """The answer to the question."""

    model_bytes: int
    compute_ms: float
    batch: float | None
    predictions: list[Answered]
    crossover: list[Crossing]


class Question(Struct, frozen=True, kw_only=True):
    """The rows, the settings and the job."""

    rows: tuple[Reading, ...]
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    link: Link | None
    straggler: Straggler | None
    job: Job
    steps: int
    seeds: range

    @staticmethod
    def ask(
        constants: Constants,
        *,
        workers: str,
        servers: str,
        rows: str | None,
        model_bytes: int | None,
        job: str | None,
        compute: str | None,
        rate: str | None,
        latency: str | None,
        jitter: str | None,
        straggler: str | None,
        straggler_ranks: str | None,
        straggler_shape: float | None,
        slice_bytes: int | None,
        optimizer: str,
        transport: str,
        overlap: float,
        batch: float | None,
        buffer: int | None,
        together: bool,
        steps: int,
        seed: int,
        seeds: int,
    ) -> Question:
        """Returns the question from the options of the command line.

        Raises:
            UsageError: An option is invalid or contradicts another.
        """
        known = link_of(constants) or Link()
        link = Link(
            rate=known.rate if rate is None else quantity.rate(rate),
            latency=known.latency if latency is None else quantity.seconds(latency),
            jitter=known.jitter if jitter is None else quantity.seconds(jitter),
        )
        between = None if link == Link() and constants.link is None else link
        counts = _counts("--workers", workers)
        return Question(
            rows=tuple(read(name.strip()) for name in (rows or _rows(constants)).split(",")),
            workers=counts,
            servers=_counts("--servers", servers),
            link=between,
            straggler=_straggler(straggler, straggler_ranks, straggler_shape, max(counts)),
            job=Job(
                model_bytes=_size(model_bytes, job),
                compute=(constants.compute or 0.0) if compute is None else quantity.seconds(compute),
                batch=batch,
                optimizer=optimizer,
                overlap=overlap,
                wire="" if transport == "auto" else transport,
                together=together or between is None,
                slice_bytes=slice_bytes,
                buffer=buffer,
                sharing=1 if constants.cluster is None else constants.cluster.gpus,
            ),
            steps=steps,
            seeds=range(seed, seed + seeds),
        )

    def answer(self, constants: Constants) -> Answer:
        """Returns all predictions, and the number of servers from which the hub beats the ring.

        Raises:
            UsageError: The calibration lacks a wire or an optimizer.
        """
        return Answer(
            model_bytes=self.job.model_bytes,
            compute_ms=1e3 * self.job.compute,
            batch=self.job.batch,
            predictions=list(self._predictions(constants)),
            crossover=[self._crossover(constants, workers) for workers in self._crossing],
        )

    @property
    def _crossing(self) -> list[int]:
        """Numbers of workers with a crossing: none if only rows of NCCL are asked for."""
        ours = any(row.collective is None for row in self.rows)
        return [workers for workers in self.workers if workers > 1 and ours]

    def _predictions(self, constants: Constants) -> Iterator[Answered]:
        for workers, row in product(self.workers, self.rows):
            if row.alone and workers != self.workers[0]:
                continue  # one process, whatever the number of workers
            for servers in self.servers if row.on_hub else self.servers[:1]:
                setting = self._setting(workers, servers)
                forecast = predict(constants, row, setting, self.job, steps=self.steps, seeds=self.seeds)
                yield Answered(
                    row=row.name,
                    workers=1 if row.alone else setting.workers,
                    servers=servers if row.on_hub else None,
                    step_ms=1e3 * forecast.step_seconds,
                    median_ms=1e3 * forecast.median_seconds,
                    range_ms=_range(forecast),
                    samples_per_second=forecast.samples_per_second,
                    efficiency=forecast.efficiency,
                    by=forecast.by,
                    bound=forecast.bound,
                    extrapolated=forecast.extrapolated,
                    finished=forecast.finished,
                    busbw=_busbw(row, forecast, self.job, workers),
                    parts_ms={name: 1e3 * seconds for name, seconds in forecast.parts.items()},
                )

    def _setting(self, workers: int, servers: int) -> Setting:
        slow = self.straggler
        if slow is not None:  # ignore slow ranks beyond the number of workers
            ranks = tuple(rank for rank in slow.ranks if rank < workers)
            slow = None if slow.ranks and not ranks else replace(slow, ranks=ranks)
        return Setting(workers=workers, servers=servers, link=self.link, straggler=slow)

    def _crossover(self, constants: Constants, workers: int) -> Crossing:
        """Returns the number of servers from which bsp is faster than the ring, with equal workers."""
        setting = Setting(workers=workers, link=self.link)
        ring = predict(constants, "ring", setting, self.job).step_seconds
        return Crossing(
            workers=workers,
            by_bytes=servers_needed(workers, min(self.job.sharing, workers)),
            predicted=overtaking(partial(self._hub, constants, setting), ring, workers),
            most_servers=most_servers(workers),
        )

    def _hub(self, constants: Constants, setting: Setting, servers: int) -> float:
        return predict(constants, "hub-bsp", replace(setting, servers=servers), self.job).step_seconds


def _busbw(row: Reading, forecast: Forecast, job: Job, workers: int) -> float | None:
    if row.collective is None or not forecast.exchange:
        return None
    return busbw(job.model_bytes, forecast.exchange, workers)


def _range(forecast: Forecast) -> tuple[float, float] | None:
    return None if forecast.low == forecast.high else (1e3 * forecast.low, 1e3 * forecast.high)


def _rows(constants: Constants) -> str:
    return ROWS if constants.cluster is None else GPU_ROWS


def _counts(flag: str, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"{flag} {text}: expected comma-separated numbers from 1, such as 1,2,4")
    return tuple(int(word) for word in words)


def _size(model_bytes: int | None, job: str | None) -> int:
    if model_bytes is not None and job is not None:
        raise UsageError("--model-bytes and --job both set the model's size; use one of them")
    if model_bytes is not None:
        return model_bytes
    name = job or "digits"
    if name not in MODELS:
        raise UsageError(f"--job {job}: expected one of {', '.join(MODELS)}; else use --model-bytes")
    return MODELS[name]


def _straggler(text: str | None, named: str | None, shape: float | None, workers: int) -> Straggler | None:
    """Returns the straggler, with its ranks below `workers`; None: no straggler."""
    if text is None and named is None and shape is None:
        return None
    if text is None:
        flag = f"--straggler-ranks {named}" if shape is None else f"--straggler-shape {shape:g}"
        raise UsageError(f"{flag}: the delay is missing; add --straggler KIND:SECONDS: pareto:20ms")
    ranks = () if named is None else _ranks(named, workers)
    found: Straggler
    match text.rpartition(":"):
        case [("constant" | "pareto" | "host") as kind, _, seconds]:
            found = Straggler(kind=kind, seconds=quantity.seconds(seconds), ranks=ranks)
        case ["", "", seconds]:
            found = Straggler(kind="constant", seconds=quantity.seconds(seconds), ranks=ranks)
        case _:
            raise UsageError(f"--straggler {text}: expected KIND:SECONDS with KIND one of {', '.join(KINDS)}")
    if shape is None:
        return found
    if found.kind != "pareto":
        raise UsageError(
            f"--straggler-shape {shape:g}: only a pareto delay has a shape, not {found.kind}; remove the flag"
        )
    return replace(found, shape=shape)


def _ranks(text: str, workers: int) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise UsageError(f"--straggler-ranks {text}: expected comma-separated ranks from 0, such as 0,3")
    ranks = tuple(map(int, words))
    if min(ranks) >= workers:
        raise UsageError(
            f"--straggler-ranks {text}: no such ranks; {workers} workers have ranks 0 to {workers - 1}"
        )
    return ranks

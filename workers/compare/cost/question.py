"""The question that `ps-compare predict` is asked, and its answer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.cost.model.constants import Constants
from hubring.workers.compare.cost.model.crossing import most_servers, overtaking, servers_needed
from hubring.workers.compare.cost.prediction import Job, predict
from hubring.workers.compare.cost.row_case import Reading, read
from hubring.workers.compare.experiment import quantity
from hubring.workers.compare.experiment.setting import Link, Setting
from hubring.workers.slowdown.straggler import Straggler

KINDS = ("constant", "pareto", "host")
MODELS = {"digits": 39720, "mlp": 100306848, "resnet50": 102228128}
"""Bytes of the models that `ps-worker bench` knows by these names."""


class Answered(Struct, frozen=True, kw_only=True):
    """A prediction as the last line has it: `Forecast` in milliseconds, and of what."""

    row: str
    workers: int
    servers: int | None
    step_ms: float
    samples_per_second: float | None
    efficiency: float
    by: str
    bound: str
    finished: bool
    parts_ms: dict[str, float]


class Crossing(Struct, frozen=True, kw_only=True):
    """From how many servers on the hub is ahead of the ring; None: with none up to `most_servers`."""

    workers: int
    by_bytes: int | None
    predicted: int | None
    most_servers: int


class Answer(Struct, frozen=True, kw_only=True):
    """What the question came to."""

    model_bytes: int
    compute_ms: float
    batch: float | None
    predictions: list[Answered]
    crossover: list[Crossing]


class Question(Struct, frozen=True, kw_only=True):
    """Which rows, in which settings, for which job."""

    rows: tuple[Reading, ...]
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    link: Link | None
    straggler: Straggler | None
    job: Job
    steps: int
    seed: int

    @staticmethod
    def ask(
        constants: Constants,
        *,
        workers: str,
        servers: str,
        rows: str,
        model_bytes: int | None,
        job: str | None,
        compute: str | None,
        rate: str | None,
        latency: str | None,
        jitter: str | None,
        straggler: str | None,
        straggler_ranks: str | None,
        slice_bytes: int | None,
        optimizer: str,
        transport: str,
        overlap: float,
        batch: float | None,
        together: bool,
        steps: int,
        seed: int,
    ) -> Question:
        """The question as the command line puts it.

        Raises:
            UsageError: A word of it means nothing, or contradicts another.
        """
        known = constants.link or Link()
        link = Link(
            rate=known.rate if rate is None else quantity.rate(rate),
            latency=known.latency if latency is None else quantity.seconds(latency),
            jitter=known.jitter if jitter is None else quantity.seconds(jitter),
        )
        between = None if constants.link is None and link == Link() else link
        counts = _counts("--workers", workers)
        return Question(
            rows=tuple(read(name.strip()) for name in rows.split(",")),
            workers=counts,
            servers=_counts("--servers", servers),
            link=between,
            straggler=_straggler(straggler, straggler_ranks, max(counts)),
            job=Job(
                model_bytes=_size(model_bytes, job),
                compute=(constants.compute or 0.0) if compute is None else quantity.seconds(compute),
                batch=batch,
                optimizer=optimizer,
                overlap=overlap,
                wire="" if transport == "auto" else transport,
                together=together or between is None,
                slice_bytes=slice_bytes,
            ),
            steps=steps,
            seed=seed,
        )

    def answer(self, constants: Constants) -> Answer:
        """All predictions, and from how many servers on the hub is ahead of the ring.

        Raises:
            UsageError: The calibration lacks a wire or an optimizer.
        """
        return Answer(
            model_bytes=self.job.model_bytes,
            compute_ms=1e3 * self.job.compute,
            batch=self.job.batch,
            predictions=list(self._predictions(constants)),
            crossover=[self._crossover(constants, workers) for workers in self.workers if workers > 1],
        )

    def _predictions(self, constants: Constants) -> Iterator[Answered]:
        for workers, row in product(self.workers, self.rows):
            for servers in self.servers if row.on_hub else self.servers[:1]:
                setting = self._setting(workers, servers)
                told = predict(constants, row, setting, self.job, steps=self.steps, seed=self.seed)
                yield Answered(
                    row=row.name,
                    workers=setting.workers,
                    servers=servers if row.on_hub else None,
                    step_ms=1e3 * told.step_seconds,
                    samples_per_second=told.samples_per_second,
                    efficiency=told.efficiency,
                    by=told.by,
                    bound=told.bound,
                    finished=told.finished,
                    parts_ms={name: 1e3 * seconds for name, seconds in told.parts.items()},
                )

    def _setting(self, workers: int, servers: int) -> Setting:
        slow = self.straggler
        if slow is not None:  # ranks that are not there are not slow
            ranks = tuple(rank for rank in slow.ranks if rank < workers)
            slow = None if slow.ranks and not ranks else replace(slow, ranks=ranks)
        return Setting(workers=workers, servers=servers, link=self.link, straggler=slow)

    def _crossover(self, constants: Constants, workers: int) -> Crossing:
        """From how many servers on bsp is faster than the ring, all workers alike."""
        setting = Setting(workers=workers, link=self.link)
        ring = predict(constants, "ring", setting, self.job).step_seconds
        return Crossing(
            workers=workers,
            by_bytes=servers_needed(workers),
            predicted=overtaking(partial(self._hub, constants, setting), ring, workers),
            most_servers=most_servers(workers),
        )

    def _hub(self, constants: Constants, setting: Setting, servers: int) -> float:
        return predict(constants, "hub-bsp", replace(setting, servers=servers), self.job).step_seconds


def _counts(flag: str, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"{flag} {text}: expected numbers from 1, by comma, as in 1,2,4")
    return tuple(int(word) for word in words)


def _size(model_bytes: int | None, job: str | None) -> int:
    if model_bytes is not None and job is not None:
        raise UsageError("--model-bytes and --job both tell the model's size: give one of them")
    if model_bytes is not None:
        return model_bytes
    name = job or "digits"
    if name not in MODELS:
        raise UsageError(f"--job {job}: known are {', '.join(MODELS)}; for others give --model-bytes")
    return MODELS[name]


def _straggler(text: str | None, named: str | None, workers: int) -> Straggler | None:
    """What is slow of at most so many workers, and which of them; None: nothing."""
    if text is None and named is None:
        return None
    if text is None:
        raise UsageError(
            f"--straggler-ranks {named}: slow by how much? Add --straggler KIND:SECONDS, as pareto:20ms"
        )
    ranks = () if named is None else _ranks(named, workers)
    match text.rpartition(":"):
        case [("constant" | "pareto" | "host") as kind, _, seconds]:
            return Straggler(kind=kind, seconds=quantity.seconds(seconds), ranks=ranks)
        case ["", "", seconds]:
            return Straggler(kind="constant", seconds=quantity.seconds(seconds), ranks=ranks)
    raise UsageError(f"--straggler {text}: expected KIND:SECONDS with KIND of {', '.join(KINDS)}")


def _ranks(text: str, workers: int) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise UsageError(f"--straggler-ranks {text}: expected ranks from 0, by comma, as in 0,3")
    ranks = tuple(map(int, words))
    if min(ranks) >= workers:
        raise UsageError(
            f"--straggler-ranks {text}: nobody is slow; ranks of {workers} workers go from 0 to {workers - 1}"
        )
    return ranks

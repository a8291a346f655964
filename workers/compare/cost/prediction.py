"""Predictions: a row's step in a setting, by the formula where it holds, else by simulation.

Formulas hold where all workers are alike and nobody is lost. Without lockstep they are the two bounds of
a closed queue (Denning and Buzen, Computing Surveys 1978): a worker's own cycle, or the busiest that
all share; with everyone alike the larger one is reached.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from hubring.workers.compare.cost.model import formulas
from hubring.workers.compare.cost.model.constants import Constants
from hubring.workers.compare.cost.model.exchange_terms import Way
from hubring.workers.compare.cost.model.formulas import Task
from hubring.workers.compare.cost.row_case import Reading, read
from hubring.workers.compare.cost.simulate.scene import Scene
from hubring.workers.compare.cost.simulate.simulation import simulate
from hubring.workers.compare.experiment.row import Row
from hubring.workers.compare.experiment.setting import Setting

By = Literal["formula", "simulation"]


class Job(Struct, frozen=True, kw_only=True):
    """What is trained, as far as its cost goes.

    Attributes:
        model_bytes: Of all parameters.
        compute: Seconds a step, forward and backward, of a worker with its share of the batch.
        batch: Samples of that share; None: not known.
        optimizer: Which steps.
        overlap: Part of `compute` behind which the exchange can hide: 2/3 where gradients leave during
            backward, 0 where computing and exchanging take the same cores.
        wire: To the hub where the row does not say; empty: the fastest that reaches.
        together: All hosts share one machine's cores; None: they do where no link joins them.
        slice_bytes: What travels at once; None: what the workers find out to be best.
    """

    model_bytes: int
    compute: float = 0.0
    batch: float | None = None
    optimizer: str = "sgd"
    overlap: float = 0.0
    wire: str = ""
    together: bool | None = None
    slice_bytes: int | None = None


class Forecast(Struct, frozen=True, kw_only=True):
    """What a row is expected to do.

    Attributes:
        step_seconds: Median step of a worker.
        samples_per_second: Of all workers; None where the job does not tell its batch.
        efficiency: Part of the step that is spent computing.
        by: How it was found.
        parts: Seconds of a step by what takes them; they overlap, so they may sum to more. `waiting` is
            for others: the slowest, or whoever is before in a queue.
        bound: Which of them is the one that counts.
        exchange: Seconds of one exchange, first byte to last.
        finished: False: the loss of a worker ends it, as it ends a ring.
    """

    step_seconds: float
    samples_per_second: float | None
    efficiency: float
    by: By
    parts: dict[str, float]
    bound: str
    exchange: float
    finished: bool = True

    @property
    def links(self) -> float:
        """Part of the exchange during which bytes are on links or in I/O threads, 0 to 1."""
        # Not by the sum of all parts, which overlap; and among others a link may be busy for longer.
        return min(1.0, self.parts["link"] / self.exchange) if self.exchange else 0.0


def predict(
    constants: Constants,
    row: str | Row | Reading,
    setting: Setting,
    job: Job,
    *,
    steps: int = 100,
    seed: int = 0,
) -> Forecast:
    """Predicts one row's step.

    Args:
        constants: Of the machine.
        row: Which way to train.
        setting: Under which circumstances.
        job: What is trained.
        steps: Simulated, of each worker.
        seed: Of the simulation's draws.

    Raises:
        UsageError: There is no model of the row, or the calibration lacks what it needs.
    """
    reading = row if isinstance(row, Reading) else read(row)
    if reading.alone:
        setting = _of_one(setting)
    way = way_of(constants, reading, setting, job)
    computing = job.compute + (setting.compute or 0.0)
    shown = computing - _hidden(way, setting.workers, job)
    found = _found(reading, setting, way, shown, steps, seed)
    parts = _parts(way, setting.workers, reading)
    exchange = _exchanging(reading, way, setting.workers)
    parts |= {"compute": computing, "waiting": max(0.0, found.seconds - shown - exchange)}
    return Forecast(
        step_seconds=found.seconds,
        samples_per_second=None if job.batch is None else found.rate * job.batch,
        efficiency=min(1.0, computing / found.seconds) if found.seconds else 0.0,
        by=found.by,
        parts=parts,
        bound=max(parts, key=lambda name: parts[name]),
        exchange=exchange,
        finished=found.finished,
    )


def way_of(constants: Constants, reading: Reading, setting: Setting, job: Job) -> Way:
    """What one exchange of the row asks of whom."""
    together = setting.link is None if job.together is None else job.together
    task = Task(
        nbytes=job.model_bytes,
        optimizer=job.optimizer,
        link=setting.link,
        together=together,
        slice_bytes=job.slice_bytes,
    )
    if not reading.on_hub:
        return formulas.ring(constants, task, 1 if reading.alone else setting.workers)
    wire = reading.wire or job.wire or reading.wire_in(setting)
    if reading.colocated and wire != "shm":
        return formulas.colocated(constants, task, setting.workers, wire, steps=reading.steps)
    lockstep, servers = reading.rule == "bsp", setting.workers if reading.colocated else setting.servers
    return formulas.hub(constants, task, setting.workers, servers, wire, steps=reading.steps, shows=lockstep)


def _of_one(setting: Setting) -> Setting:
    """What of a setting a process alone meets: its own host's slowness, all computing, no other's loss."""
    slow = setting.straggler
    here = slow is not None and (not slow.ranks or 0 in slow.ranks)
    return Setting(
        workers=1,
        straggler=replace(slow, ranks=()) if slow is not None and here else None,
        compute=setting.compute_of(1),
    )


def _alike(reading: Reading, setting: Setting) -> bool:
    slow = setting.straggler is not None and setting.straggler.seconds > 0
    return not slow and setting.fault is None and reading.rule != "backup"


class _Found(NamedTuple):
    seconds: float
    rate: float
    """Steps a second, of all workers."""
    by: By
    finished: bool = True


def _found(reading: Reading, setting: Setting, way: Way, compute: float, steps: int, seed: int) -> _Found:
    """The step, by formula where it holds."""
    if not _alike(reading, setting):
        course = simulate(_scene(reading, setting, way, compute, steps, seed))
        return _Found(course.step_seconds, course.steps_per_second, "simulation", course.finished)
    seconds = compute + _exchanging(reading, way, setting.workers)
    if reading.rule in ("ssp", "asp"):
        seconds = max(seconds, setting.workers * way.bottleneck)
    return _Found(seconds, setting.workers / seconds, "formula")


def _exchanging(reading: Reading, way: Way, workers: int) -> float:
    """An exchange, beside all others in lockstep, else as if alone."""
    together = reading.on_hub and reading.rule in ("bsp", "backup")
    return way.lockstep(workers if together else 1)


def _hidden(way: Way, workers: int, job: Job) -> float:
    """Of the exchange, what passes while backward still runs: all slices but the last, at most."""
    busiest = max(way.moving(workers), way.serving(workers), way.working(workers))
    return min(job.overlap * job.compute, busiest * (1 - 1 / way.slices))


def _scene(reading: Reading, setting: Setting, way: Way, compute: float, steps: int, seed: int) -> Scene:
    return Scene(
        workers=setting.workers,
        way=way,
        compute=compute,
        rule="ring" if reading.alone else reading.rule,
        staleness=reading.staleness,
        backup=reading.backup,
        straggler=setting.straggler,
        fault=setting.fault,
        steps=steps,
        seed=seed,
    )


def _parts(way: Way, workers: int, reading: Reading) -> dict[str, float]:
    crowd = workers if reading.on_hub else 1
    return {
        "link": way.moving(crowd),
        "server": way.serving(crowd),
        "cores": way.working(crowd),
        "latency": way.latency + way.sway(crowd),
        "step": way.after,
    }

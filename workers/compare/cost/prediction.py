"""Predicts a row's step in a setting, by formula if one applies, else by simulation.

Formulas apply if all workers are alike and none is lost. Without lockstep they are the two bounds of a closed
queue (Denning and Buzen, Computing Surveys 1978): a worker's own cycle, or the busiest shared resource. With
equal workers the larger bound is reached.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from hubring.ps.core.errors import UsageError
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
    """What is trained, as far as it affects cost.

    Attributes:
        model_bytes: Bytes of all parameters.
        compute: Seconds a step, forward and backward, of a worker with its share of the batch.
        batch: Samples of that share; None: unknown.
        optimizer: Optimizer of the parameters.
        overlap: Share of `compute` that the exchange can overlap with: 2/3 if gradients are sent during
            backward, 0 if compute and exchange need the same cores.
        wire: Wire to the hub, unless the row sets one; empty: the fastest that is available.
        together: All hosts share one machine's cores; None: they do if there is no link.
        slice_bytes: Bytes of a slice; None: the best size that workers find.
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
    """Prediction for a row.

    Attributes:
        step_seconds: Median step of a worker.
        samples_per_second: Of all workers; None if the job has no batch size.
        efficiency: Share of the step that is compute.
        by: How it was found.
        parts: Seconds of a step by cause; they overlap, so their sum can be larger. `waiting` is the wait
            for others: for the slowest, or in a queue.
        bound: The largest part.
        exchange: Seconds of one exchange, first byte to last.
        finished: False: losing a worker ends the job, as with a ring.
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
        """Share of the exchange during which bytes are on links or in I/O threads, 0 to 1."""
        # Not a share of the sum of all parts, because parts overlap.
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
        row: The row.
        setting: The setting.
        job: What is trained.
        steps: Simulated steps of each worker.
        seed: Seed of the simulation's draws.

    Raises:
        UsageError: There is no model of the row, or the calibration lacks a constant.
    """
    reading = row if isinstance(row, Reading) else read(row)
    if reading.alone:
        setting = _of_one(setting)
    if reading.backup and setting.workers <= reading.backup:
        raise UsageError(
            f"row {reading.name} waits for all but {reading.backup} of the workers, and there are only"
            f" {setting.workers}; predict it for more workers"
        )
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
    """Returns the load of one exchange of the row on links and processors."""
    together = setting.link is None if job.together is None else job.together
    task = Task(
        nbytes=round(job.model_bytes * reading.traffic),
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
    """Returns the part of a setting that affects a single process: its own slowness, and all compute."""
    slow = setting.straggler
    here = slow is not None and (not slow.ranks or 0 in slow.ranks)
    return Setting(
        workers=1,
        straggler=replace(slow, ranks=()) if slow is not None and here else None,
        compute=setting.compute_of(1),
    )


def _alike(reading: Reading, setting: Setting) -> bool:
    slow = setting.straggler is not None and setting.straggler.seconds > 0
    lost = setting.fault is not None and setting.fault.worker is not None
    return not slow and not lost and reading.rule != "backup"


class _Found(NamedTuple):
    seconds: float
    rate: float
    """Steps a second, of all workers."""
    by: By
    finished: bool = True


def _found(reading: Reading, setting: Setting, way: Way, compute: float, steps: int, seed: int) -> _Found:
    """Returns the step, by formula if one applies."""
    if not _alike(reading, setting):
        course = simulate(_scene(reading, setting, way, compute, steps, seed))
        return _Found(course.step_seconds, course.steps_per_second, "simulation", course.finished)
    seconds = compute + _exchanging(reading, way, setting.workers)
    if reading.rule in ("ssp", "asp"):
        seconds = max(seconds, setting.workers * way.bottleneck)
    return _Found(seconds, setting.workers / seconds, "formula")


def _exchanging(reading: Reading, way: Way, workers: int) -> float:
    """Returns the time of an exchange: of all workers at once in lockstep, else of one worker alone."""
    together = reading.on_hub and reading.rule in ("bsp", "backup")
    return way.lockstep(workers if together else 1)


def _hidden(way: Way, workers: int, job: Job) -> float:
    """Returns the part of the exchange that overlaps with backward: at most all slices but the last."""
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
        fault=setting.fault if setting.fault and setting.fault.worker is not None else None,
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

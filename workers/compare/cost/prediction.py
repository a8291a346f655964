"""Predicts a row's step in a setting, by formula if one applies, else by simulation.

Formulas apply if all workers are alike and none is lost. Without lockstep they are the two bounds of a closed
queue (Denning and Buzen, Computing Surveys 1978): a worker's own cycle, or the busiest shared resource. With
equal workers the larger bound is reached.

Steps are means, so that a step and a speed are two sides of one number: step x samples per second = workers x
batch. A simulation with random delays runs with several seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.cost.cluster.allreduce import Shape
from hubring.workers.compare.cost.model import formulas
from hubring.workers.compare.cost.model.constants import Constants
from hubring.workers.compare.cost.model.exchange_terms import Way
from hubring.workers.compare.cost.model.formulas import Task
from hubring.workers.compare.cost.model.overlap import hidden
from hubring.workers.compare.cost.row_case import Reading, read
from hubring.workers.compare.cost.simulate.scene import Scene
from hubring.workers.compare.cost.simulate.simulation import simulate
from hubring.workers.compare.experiment.row import Row
from hubring.workers.compare.experiment.setting import Setting
from hubring.workers.slowdown.hardship import FORWARD

By = Literal["formula", "simulation", "sweep"]
"""`sweep`: as nccl-tests measured it."""
LINK, THREAD, WINDOW, INSIDE = MOVING = ("link", "I/O thread", "window", "inside node")
"""Parts of a step in which bytes move."""
SATURATED = 0.95
"""Share of a step during which a resource is busy, above which it is what limits the step."""
SEEDS = 5
"""Seeds of a simulation with random delays."""


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
        slice_bytes: Bytes of a slice; None: the size that workers choose.
        tensors: Bytes of each parameter in the order of registration; empty: unknown.
        sharing: Workers on each host, which share its link.
        buffer: Bytes of a switch's port; None: large enough for all that is in flight.
    """

    model_bytes: int
    compute: float = 0.0
    batch: float | None = None
    optimizer: str = "sgd"
    overlap: float = 0.0
    wire: str = ""
    together: bool | None = None
    slice_bytes: int | None = None
    tensors: tuple[int, ...] = ()
    sharing: int = 1
    buffer: float | None = None


class Forecast(Struct, frozen=True, kw_only=True):
    """Prediction for a row.

    Attributes:
        step_seconds: Mean step of a worker.
        median_seconds: Median step of a worker.
        low: The fastest seed's mean step; `step_seconds` without random delays.
        high: The slowest seed's mean step.
        samples_per_second: Of all workers; None if the job has no batch size, or its step takes no time.
        efficiency: Share of the step that is compute.
        by: How it was found.
        parts: Seconds of a step by cause; they overlap, so their sum can be larger. `waiting` is the wait
            for others: for the slowest, or in a queue. `I/O thread` is the calibrated host's: a faster host
            may need less.
        bound: The largest part; if workers wait for a resource that is busy all the time, that resource.
        exchange: Seconds of one exchange, first byte to last.
        extrapolated: Whether the setting is outside of what was calibrated: a faster link, or for rows of
            NCCL more nodes, or a size that no sweep has.
        finished: False: losing a worker ends the job, as with a ring.
    """

    step_seconds: float
    median_seconds: float
    low: float
    high: float
    samples_per_second: float | None
    efficiency: float
    by: By
    parts: dict[str, float]
    bound: str
    exchange: float
    extrapolated: bool = False
    finished: bool = True

    @property
    def links(self) -> float:
        """Share of the exchange during which bytes are on links or in I/O threads, 0 to 1."""
        # Not a share of the sum of all parts, because parts overlap.
        moving = max(self.parts[name] for name in MOVING)
        return min(1.0, moving / self.exchange) if self.exchange else 0.0


def predict(
    constants: Constants,
    row: str | Row | Reading,
    setting: Setting,
    job: Job,
    *,
    steps: int = 100,
    seeds: Sequence[int] = range(SEEDS),
) -> Forecast:
    """Predicts one row's step.

    Args:
        constants: Of the machine.
        row: The row.
        setting: The setting.
        job: What is trained.
        steps: Simulated steps of each worker.
        seeds: Seeds of the simulation's draws, at least one. Without random delays only the first counts.

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
    crowd = setting.workers if reading.together else 1
    exchange = way.lockstep(crowd)
    shown = computing - _hidden(way, crowd, setting, job, computing + exchange)
    found = _found(reading, setting, way, shown, steps, seeds)
    parts = _parts(way, crowd)
    parts |= {"compute": computing, "waiting": max(0.0, found.seconds - shown - exchange)}
    return Forecast(
        step_seconds=found.seconds,
        median_seconds=found.median,
        low=found.low,
        high=found.high,
        samples_per_second=_speed(setting, job, found.seconds),
        efficiency=min(1.0, computing / found.seconds) if found.seconds else 0.0,
        by="sweep" if found.by == "formula" and _swept(constants, reading, setting, job) else found.by,
        parts=parts,
        bound=_bound(reading, setting, way, parts, found.seconds),
        exchange=exchange,
        extrapolated=_beyond(constants, reading, setting, job),
        finished=found.finished,
    )


def _bound(reading: Reading, setting: Setting, way: Way, parts: dict[str, float], step: float) -> str:
    """Returns what a faster one of would shorten the step."""
    largest = max(parts, key=lambda name: parts[name])
    if largest != "waiting" or reading.rule not in ("ssp", "asp"):
        return largest
    loads = {
        name: load
        for name, load in _parts(way, setting.workers).items()
        if name in (*MOVING, "server", "cores")
    }
    busiest = max(loads, key=lambda name: loads[name])
    return busiest if loads[busiest] >= SATURATED * step else largest


def _speed(setting: Setting, job: Job, step: float) -> float | None:
    return setting.workers * job.batch / step if job.batch is not None and step else None


def way_of(constants: Constants, reading: Reading, setting: Setting, job: Job) -> Way:
    """Returns the load of one exchange of the row on links and processors."""
    together = setting.link is None if job.together is None else job.together
    task = Task(
        nbytes=job.model_bytes,
        optimizer=job.optimizer,
        link=setting.link,
        together=together,
        slice_bytes=job.slice_bytes,
        traffic=reading.traffic,
        tensors=job.tensors,
        pause=job.compute + (setting.compute or 0.0),
        sharing=min(job.sharing, setting.workers),
        buffer=job.buffer,
    )
    if reading.collective is not None:
        return formulas.nccl(constants, task, setting.workers, reading.collective)
    if not reading.on_hub:
        workers = 1 if reading.alone else setting.workers
        return formulas.ring(constants, task, workers, reading.shards or formulas.WHOLE)
    wire = _wire(reading, setting, job)
    if reading.colocated and wire != "shm":
        return formulas.colocated(constants, task, setting.workers, wire, steps=reading.steps)
    lockstep, servers = reading.rule == "bsp", setting.workers if reading.colocated else setting.servers
    return formulas.hub(constants, task, setting.workers, servers, wire, steps=reading.steps, shows=lockstep)


def _wire(reading: Reading, setting: Setting, job: Job) -> str:
    return reading.wire or (job.wire if reading.on_hub else "") or reading.wire_in(setting)


def _beyond(constants: Constants, reading: Reading, setting: Setting, job: Job) -> bool:
    """Whether the setting is outside of what was calibrated: a faster link, or more nodes or bytes."""
    if setting.workers == 1:
        return False
    if reading.collective is not None and constants.cluster is not None:
        shape = Shape.of(setting.workers, constants.cluster.gpus)
        return not constants.cluster.covers(*shape, job.model_bytes)
    rate = None if setting.link is None else setting.link.rate
    return rate is not None and rate > constants.fastest(_wire(reading, setting, job))


def _swept(constants: Constants, reading: Reading, setting: Setting, job: Job) -> bool:
    cluster = constants.cluster
    if cluster is None or reading.collective != "nccl":
        return False
    return cluster.measured(*Shape.of(setting.workers, cluster.gpus), job.model_bytes) is not None


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
    """Mean step of a worker."""
    median: float
    low: float
    high: float
    by: By
    finished: bool = True


def _found(
    reading: Reading, setting: Setting, way: Way, compute: float, steps: int, seeds: Sequence[int]
) -> _Found:
    """Returns the step, by formula if one applies."""
    if _alike(reading, setting):
        seconds = compute + way.lockstep(setting.workers if reading.together else 1)
        if reading.rule in ("ssp", "asp"):
            seconds = max(seconds, setting.workers * way.bottleneck)
        return _Found(seconds, seconds, seconds, seconds, "formula")
    slow = setting.straggler
    random = slow is not None and slow.seconds > 0 and slow.kind != "constant"
    courses = [
        simulate(_scene(reading, setting, way, compute, steps, seed))
        for seed in (seeds if random else seeds[:1])
    ]
    means = [setting.workers * each.seconds / max(1, each.exchanges) for each in courses]
    total = setting.workers * sum(each.seconds for each in courses)
    return _Found(
        total / max(1, sum(each.exchanges for each in courses)),
        median(each.step_seconds for each in courses),
        min(means),
        max(means),
        "simulation",
        all(each.finished for each in courses),
    )


def _hidden(way: Way, crowd: int, setting: Setting, job: Job, step: float) -> float:
    """Returns the part of the exchange that overlaps with backward: at most all groups but the last."""
    # An emulated device sleeps, so its whole backward leaves the cores to the exchange.
    backward = job.overlap * job.compute + (1 - FORWARD) * (setting.compute or 0.0)
    busiest = way.overlapping * max(way.moving(crowd), way.serving(crowd), way.working(crowd))
    return hidden(busiest, backward, step - backward - busiest, job.model_bytes, job.tensors)


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


def _parts(way: Way, crowd: int) -> dict[str, float]:
    moving = way.carriers(crowd)
    return {
        LINK: moving.link,
        THREAD: moving.thread,
        WINDOW: moving.window,
        INSIDE: moving.inside,
        "server": way.serving(crowd),
        "cores": way.working(crowd),
        "latency": max(way.latency, way.rounds) + way.sway(crowd),
        "step": way.after,
    }

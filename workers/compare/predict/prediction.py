"""Predicts a row's step in a setting, by formula if one applies, else by simulation.

Formulas apply if all workers are alike. Without lockstep they are the two bounds of a closed
queue (Denning and Buzen, Computing Surveys 1978): a worker's own cycle, or the busiest shared resource. With
equal workers the larger bound is reached.

Steps are means, so that a step and a speed are two sides of one number: step x samples per second = workers x
batch. A simulation with random delays runs with several seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal

from msgspec import Struct
from msgspec.structs import asdict, replace

from hubring.ps.core import types
from hubring.ps.core.errors import UsageError
from hubring.workers.compare.plan.row import OURS, ROWS, Row
from hubring.workers.compare.plan.setting import Link, Setting
from hubring.workers.compare.predict.calibrations import Constants
from hubring.workers.compare.predict.exchange_terms import ExchangeTask, HubExchange
from hubring.workers.compare.predict.formulas import WHOLE, ExchangeCosts, Shards
from hubring.workers.compare.predict.nccl import Algorithm, ClusterShape
from hubring.workers.compare.predict.simulation import SimulationInput, simulate
from hubring.workers.compare.predict.slicing import hidden
from hubring.workers.runtime.slowdown import FORWARD_SHARE

RINGS = ("ddp", "ddp-gloo", "mpi", "gloo+sgd", "horovod")
"""Rows of peers that are allreduces around a ring."""
SHARDED: dict[str, Shards] = {
    # Gathered for forward and for backward, and Gloo's reduce-scatter, which is an allreduce. Each call
    # blocks, and torch copies into and out of its messages.
    "fsdp2": Shards(passes=4, gathers=2, copies=5, overlaps=False),
    # DDP's allreduce, then a broadcast of the parameters that each worker stepped.
    "zero1": Shards(broadcast=True),
}
"""Rows of peers that divide the optimizer's step."""
NCCL: dict[str, Algorithm] = {
    "nccl": "nccl",
    "nccl-ring": "ring",
    "nccl-tree": "tree",
    "nccl-two-level": "two-level",
}
"""Rows of allreduces between GPUs. `run` does not have them: they are only predicted."""
SCORED = ("ring", "hub-bsp", "hub-asp", "nccl", "nccl-ring", "nccl-tree")
"""Rows whose predictions were published beside measurements (ps/MEASUREMENTS.md)."""
GLOO = ("ring", "ddp", *SHARDED)
"""Rows that can also be on NCCL, and are predicted on Gloo; a ring on one host in shared memory."""
HUBS = ("rpc", "ray")
"""Rows of peers that have one server over a wire."""
_SHARES = {"bf16": 1 / 2, "fp16": 1 / 2, "int8": 1 / 4, "sign": 1 / 32, "topk": 2.0}
"""Bytes by codec, as a share of float32; for topk, of its fraction: each element comes with its index."""


def read_row(row: str | Row) -> Row:
    """Returns a row as the model knows it: a peer is a ring, or a hub over a wire.

    Raises:
        UsageError: There is no model of the row.
    """
    name = row if isinstance(row, str) else row.name
    if name in (*RINGS, *SHARDED, *NCCL):
        return Row(name, "", "ring", backend="gloo")
    if name in HUBS:
        return Row(name, "", "bsp", transport="zmq")
    if isinstance(row, str):
        if name not in OURS:
            known = ", ".join((*OURS, *RINGS, *SHARDED, *NCCL, *HUBS))
            raise UsageError(f"no model of row {name!r}; expected one of {known}")
        row = OURS[name]
    traffic(row)  # fails if it is not known
    return row


def traffic(row: Row) -> float:
    """Returns the bytes that a row sends and receives, as a share of those without compression.

    Raises:
        UsageError: The share depends on the shapes of the model.
    """
    if not row.codec:
        return 1.0
    kind, argument = types.parse_codec(row.codec)
    if kind not in _SHARES:
        raise UsageError(f"no model of --compress {row.codec}, whose size depends on the shapes of the model")
    share = _SHARES[kind] * (argument or 1.0)
    # The mean returns in the codec too, except from a hub that steps: it returns whole parameters.
    return share if row.rule == "ring" or row.aggregate else (1 + share) / 2


By = Literal["formula", "simulation", "sweep"]
"""`sweep`: as nccl-tests measured it."""
LINK, THREAD, INSIDE = MOVING = ("link", "I/O thread", "inside node")
"""Parts of a step in which bytes move."""
SATURATED = 0.95
"""Share of a step during which a resource is busy, above which it is what limits the step."""
SEEDS = 5
"""Seeds of a simulation with random delays."""


class PredictedJob(ExchangeTask, frozen=True, kw_only=True):
    """What is trained, as far as it affects cost. Its setting and row set `link` and `traffic`.

    Attributes:
        compute: Seconds a step, forward and backward, of a worker with its share of the batch.
        batch: Samples of that share; None: unknown.
        overlap: Share of `compute` that the exchange can overlap with: 2/3 if gradients are sent during
            backward, 0 if compute and exchange need the same cores.
        wire: Wire to the hub, unless the row sets one; empty: the fastest that is available.
    """

    compute: float = 0.0
    batch: float | None = None
    overlap: float = 0.0
    wire: str = ""


class StepForecast(Struct, frozen=True):
    """How long a row's step takes.

    Attributes:
        step_seconds: Mean step of a worker.
        median_seconds: Median step of a worker.
        low: The fastest seed's mean step; `step_seconds` without random delays.
        high: The slowest seed's mean step.
        by: How it was found.
    """

    step_seconds: float
    median_seconds: float
    low: float
    high: float
    by: By


class Forecast(StepForecast, frozen=True, kw_only=True):
    """Prediction for a row.

    Attributes:
        samples_per_second: Of all workers; None if the job has no batch size, or its step takes no time.
        efficiency: Share of the step that is compute.
        parts: Seconds of a step by cause; they overlap, so their sum can be larger. `waiting` is the wait
            for others: for the slowest, or in a queue. `I/O thread` is the calibrated host's: a faster host
            may need less.
        bound: The largest part; if workers wait for a resource that is busy all the time, that resource.
        exchange: Seconds of one exchange, first byte to last.
        extrapolated: Whether the setting is outside of what was calibrated: a faster link, or for rows of
            NCCL more nodes, or a size that no sweep has.
    """

    samples_per_second: float | None
    efficiency: float
    parts: dict[str, float]
    bound: str
    exchange: float
    extrapolated: bool = False


def predict(
    constants: Constants,
    row: str | Row,
    setting: Setting,
    job: PredictedJob,
    *,
    steps: int = 100,
    seeds: Sequence[int] = range(SEEDS),
) -> Forecast:
    """Predicts one row's step in a setting without a fault.

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
    row = read_row(row)
    if row.rule is None:  # its own slowness, and all compute
        slow = ROWS["local"].meets(setting).straggler
        here = None if slow is None else replace(slow, ranks=())
        setting = Setting(workers=1, straggler=here, compute=setting.compute_of(1))
    if row.backup and setting.workers <= row.backup:
        raise UsageError(
            f"row {row.name} needs at least {row.backup + 1} workers, not {setting.workers}; pass"
            f" --workers {row.backup + 1} or more"
        )
    way = _exchange(constants, row, setting, job)
    computing = job.compute + (setting.compute or 0.0)
    # Those that exchange at the same time over shared links; a ring's links are its own.
    crowd = setting.workers if row.rule in ("bsp", "backup") else 1
    exchange = way.lockstep(crowd)
    # An emulated device sleeps, so its whole backward leaves the cores to the exchange.
    backward = job.overlap * job.compute + (1 - FORWARD_SHARE) * (setting.compute or 0.0)
    busiest = way.overlapping * max(way.moving(crowd), way.serving(crowd), way.working(crowd))
    rest = computing + exchange - backward - busiest
    shown = computing - hidden(busiest, backward, rest, job.nbytes, job.tensors)
    found = _found(row, setting, way, shown, steps, seeds)
    parts = _parts(way, crowd)
    step = found.step_seconds
    parts |= {"compute": computing, "waiting": max(0.0, step - shown - exchange)}
    extrapolated, swept = _calibrated(constants, row, setting, job)
    if found.by == "formula" and swept:
        found = replace(found, by="sweep")
    return Forecast(
        **asdict(found),
        samples_per_second=setting.workers * job.batch / step if job.batch is not None and step else None,
        efficiency=min(1.0, computing / step) if step else 0.0,
        parts=parts,
        bound=_bound(row, setting, way, parts, step),
        exchange=exchange,
        extrapolated=extrapolated,
    )


def _bound(row: Row, setting: Setting, way: HubExchange, parts: dict[str, float], step: float) -> str:
    """Returns what a faster one of would shorten the step."""
    largest = max(parts, key=lambda name: parts[name])
    if largest != "waiting" or row.rule not in ("ssp", "asp"):
        return largest
    loads = _parts(way, setting.workers)
    busiest = max((*MOVING, "server", "cores"), key=lambda name: loads[name])
    return busiest if loads[busiest] >= SATURATED * step else largest


def _exchange(constants: Constants, row: Row, setting: Setting, job: PredictedJob) -> HubExchange:
    """Returns the load of one exchange of the row on links and processors."""
    task = replace(
        job,
        link=setting.link or Link(),
        together=setting.link is None if job.together is None else job.together,
        traffic=traffic(row),
        sharing=min(max(job.sharing, setting.sharing), setting.workers),
    )
    costs = ExchangeCosts(constants, task, setting.workers)
    steps, wire = not row.aggregate, wire_of(row, setting, job)
    if row.name in NCCL:
        return costs.nccl(NCCL[row.name])
    if not row.on_hub and wire == "shm":  # each worker averages its part, as a shard does
        return costs.hub(setting.workers, "shm", steps=False, shows=False)
    if row.local and task.sharing > 1:
        return costs.two_levels(setting.servers if row.on_hub else 0, wire, steps=steps)
    if not row.on_hub:
        return costs.ring(SHARDED.get(row.name, WHOLE))
    if row.colocated and wire != "shm":
        return costs.colocated(wire, steps=steps)
    servers = setting.workers if row.colocated else setting.servers
    return costs.hub(servers, wire, steps=steps, shows=row.rule == "bsp")


def wire_of(row: Row, setting: Setting, job: PredictedJob) -> str:
    """Returns the wire of a row's gradients."""
    if not row.on_hub:
        alone = row.rule != "ring" or setting.workers == 1
        apart = setting.link is not None and setting.sharing < setting.workers
        return "shm" if not (alone or row.backend or apart) else "gloo"
    return row.transport or job.wire or ("shm" if setting.link is None else "zmq")


def _calibrated(constants: Constants, row: Row, setting: Setting, job: PredictedJob) -> tuple[bool, bool]:
    """Returns whether the setting is outside of what was calibrated, and whether a sweep has its size."""
    if row.name in NCCL and constants.cluster is not None:
        cluster, shape = constants.cluster, ClusterShape.of(setting.workers, constants.cluster.gpus)
        beyond = shape.ranks > 1 and not cluster.covers(shape, job.nbytes)
        return beyond, row.name == "nccl" and cluster.measured(shape, job.nbytes) is not None
    rate = None if setting.link is None else setting.link.rate
    if rate is None or setting.workers == 1:
        return False, False
    return rate > constants.fastest(wire_of(row, setting, job)), False


def _found(
    row: Row, setting: Setting, way: HubExchange, compute: float, steps: int, seeds: Sequence[int]
) -> StepForecast:
    """Returns the step, by formula if one applies: all workers are alike."""
    slow = setting.straggler if setting.straggler and setting.straggler.seconds > 0 else None
    if slow is None and row.rule != "backup":
        seconds = compute + way.lockstep(setting.workers if row.rule == "bsp" else 1)
        if row.rule in ("ssp", "asp"):
            seconds = max(seconds, setting.workers * way.bottleneck)
        return StepForecast(seconds, seconds, seconds, seconds, "formula")
    random = slow is not None and slow.kind != "constant"
    courses = [
        simulate(SimulationInput(row=row, setting=setting, way=way, compute=compute, steps=steps, seed=seed))
        for seed in (seeds if random else seeds[:1])
    ]
    means = [setting.workers * each.seconds / max(1, each.exchanges) for each in courses]
    total = setting.workers * sum(each.seconds for each in courses)
    return StepForecast(
        total / max(1, sum(each.exchanges for each in courses)),
        median(each.step_seconds for each in courses),
        min(means),
        max(means),
        "simulation",
    )


def _parts(way: HubExchange, crowd: int) -> dict[str, float]:
    moving = way.own_by.beside(way.shared_by.times(crowd))
    return {
        LINK: moving.link,
        THREAD: moving.thread,
        INSIDE: moving.inside,
        "server": way.serving(crowd),
        "cores": way.working(crowd),
        "latency": way.latency + way.sway(crowd),
        "step": way.after,
    }

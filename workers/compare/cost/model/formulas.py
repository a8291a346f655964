"""Formulas of a step's exchange; exact if all workers are alike and begin together.

M: bytes of the model, B: bytes per second of a host's link each way, n: workers, k: servers.

| topology | bytes at line rate | why |
| --- | --- | --- |
| ring | 2(n-1)/n M/B + `rounds` | 2(n-1) rounds of M/n (Patarasuk and Yuan, JPDC 2009) |
| fsdp2, zero1 | 4(n-1)/n and 3(n-1)/n M/B + `rounds` | more passes around the ring (`Shards`) |
| hub, k hosts of its own | max(1, n/k) M/B + 2 alpha | a server's link carries n M/k each way at once |
| hub, colocated | 2(n-1)/n M/B + 2 alpha | a host carries (n-1)/n M for its worker and for its shard |
| one machine | copies / cores | loopback is no wire: the processors move the bytes |

So with equal links a hub with separate servers wins when k > n^2/(2(n-1)), about n/2 (Jiang et al., "BytePS",
OSDI 2020). A formula with max() holds if links and processors work at the same time. Slices ensure that; how
well depends on their number (`hubring.workers.compare.cost.model.exchange_terms`).

On one machine the hosts share cores, whatever links connect them. No exchange is faster than its total
processor time divided by the number of cores.
"""

from __future__ import annotations

from functools import partial
from math import ceil, log2
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from hubring.ps.core.errors import UsageError
from hubring.ps.core.timing import fastest
from hubring.workers.communicators import slice_sizes
from hubring.workers.compare.cost.cluster.allreduce import Algorithm, Shape, allreduce
from hubring.workers.compare.cost.model import incast, slicing
from hubring.workers.compare.cost.model.constants import Constants
from hubring.workers.compare.cost.model.exchange_terms import (
    BURST_BYTES,
    Carriers,
    Way,
    a_byte,
    seconds_a_byte,
    spread,
)
from hubring.workers.compare.cost.model.ring_latency import SEGMENT_BYTES, down, rounds
from hubring.workers.compare.cost.model.slicing import Cut, cut
from hubring.workers.compare.experiment.setting import Link

SERVER_LINES = {"zmq": 2}
"""Connections whose bytes a server moves at once, each in its own thread; 1 for any other wire."""


class Task(Struct, frozen=True, kw_only=True):
    """What is exchanged, and where.

    Attributes:
        nbytes: Bytes of the parameters.
        optimizer: Optimizer of the parameters.
        link: Link of each host; None: limited only by the machine.
        together: All hosts share one machine's cores.
        slice_bytes: Bytes of a slice; None: the size that workers choose (`slice_sizes`).
        traffic: Bytes that are exchanged, as a share of `nbytes`.
        tensors: Bytes of each parameter in the order of registration; empty: unknown.
        pause: Seconds of a step outside of the exchange.
        sharing: Workers on each host, which share its link.
        buffer: Bytes of a switch's port; None: large enough.
    """

    nbytes: int
    optimizer: str = "sgd"
    link: Link | None = None
    together: bool = False
    slice_bytes: int | None = None
    traffic: float = 1.0
    tensors: tuple[int, ...] = ()
    pause: float = 0.0
    sharing: int = 1
    buffer: float | None = None

    def incast(self, workers: int, nbytes: float) -> float:
        """Returns the seconds that dropped packets cost if workers send `nbytes` each to one server."""
        if self.link is None or self.link.rate is None or self.buffer is None:
            return 0.0
        return incast.delay(workers, nbytes, self.link.rate, 2 * self.latency, self.buffer)

    @property
    def moved(self) -> float:
        """Bytes that a worker sends to a hub."""
        return self.nbytes * self.traffic

    @property
    def burst(self) -> float:
        """Seconds that the token bucket of an emulated link saves after a pause; 0 for any other link."""
        rate = None if self.link is None else self.link.rate
        return BURST_BYTES * 8 / rate if rate is not None and self.together else 0.0

    def cut(self, servers: int, slice_bytes: int) -> Cut:
        """Returns the busiest server's part of the model."""
        return cut(self.nbytes, servers, slice_bytes, self.tensors)

    @property
    def latency(self) -> float:
        return 0.0 if self.link is None else self.link.latency

    @property
    def jitter(self) -> float:
        return 0.0 if self.link is None else self.link.jitter

    def crowd(self, processes: int, constants: Constants) -> float:
        """Returns the slowdown of each process if `processes` compute at once."""
        return max(1.0, processes / constants.cores) if self.together else 1.0


class Shards(Struct, frozen=True, kw_only=True):
    """How a ring's workers divide the optimizer's step.

    Attributes:
        passes: Passes of the model around the ring: 1 to gather or to reduce-scatter, 2 for an allreduce.
        gathers: How many of them gather.
        copies: Copies of the model in memory.
        overlaps: Whether the passes can overlap with backward.
        divided: Whether a worker steps a part of the parameters, else all.
        broadcast: Whether a worker's part consists of whole parameters, which it broadcasts after the step.
    """

    passes: int = 2
    gathers: int = 0
    copies: int = 1
    overlaps: bool = True
    divided: bool = True
    broadcast: bool = False

    def parts(self, task: Task, workers: int) -> tuple[float, float]:
        """Returns the smallest and the largest part that a worker steps, as shares of the model."""
        if not self.divided:
            return 1.0, 1.0
        if not self.broadcast or not task.tensors:
            return 1 / workers, 1 / workers
        loads = [0] * workers
        for nbytes in sorted(task.tensors, reverse=True):  # as torch deals them
            loads[loads.index(min(loads))] += nbytes
        return min(loads) / sum(loads), max(loads) / sum(loads)


WHOLE = Shards(divided=False)
"""An allreduce. Gloo sums, so the division is another pass over the gradients."""


def own_step(constants: Constants, task: Task, workers: int) -> float:
    """Returns the time of the optimizer's step if every worker steps."""
    return task.nbytes * constants.step(task.optimizer) * task.crowd(workers, constants)


def ring(constants: Constants, task: Task, workers: int, shards: Shards = WHOLE) -> Way:
    """Returns an allreduce around the ring with each worker's step; `Way.lockstep(1)` is its time.

    With `shards`, it is what they exchange instead of an allreduce, and their part of the step.

    Holds for the bandwidth-optimal ring, which Gloo uses: pieces of M/n go around twice minus one hop each,
    and the next piece arrives while one is added. All n links are equally busy.
    """
    wire = constants.wire("gloo")
    least, most = shards.parts(task, workers)
    # Of a broadcast, links are busiest where the largest part leaves, in a tree, or where the others arrive.
    copies = ceil(log2(workers)) if shards.broadcast else 0
    spread_out = max(copies * most, 1 - least) if copies else 0.0
    passing = shards.passes * (workers - 1) / workers
    moved = (passing + spread_out) * task.moved
    # A ring enters and leaves each host once, however many of its workers are there.
    carrying = a_byte(wire, task.link)
    carriers = carrying.times(moved)
    # Gloo sums in segments of a limited size, and gathers in two of any size.
    passes = ((shards.passes - shards.gathers, SEGMENT_BYTES), (shards.gathers, task.nbytes))
    around = [rounds(task, *each, workers, wire.alpha, carrying.seconds) for each in passes]
    return Way(
        latency=sum(each.added for each in around) + down(task, copies, wire.alpha),
        rounds=sum(each.seconds for each in around),
        after=_mean_and_step(constants, task, workers, shards.copies, most),
        cores=workers * moved * wire.cpu / constants.cores if task.together else 0.0,
        own_by=carriers,
        burst=task.burst,
        pause=task.pause,
        overlapping=passing / (passing + spread_out) if shards.overlaps and passing else 0.0,
    )


def nccl(constants: Constants, task: Task, workers: int, algorithm: Algorithm) -> Way:
    """Returns an allreduce of NCCL on a cluster; `Way.lockstep(1)` is its time. Steps belong to compute.

    Raises:
        UsageError: The calibration has no cluster, or it lacks what the number of workers needs.
    """
    if constants.cluster is None:
        raise UsageError(
            "the calibration has no GPUs; for rows of nccl use `--calibration h100`, `--calibration` with the"
            " output of nccl-tests, or `--gpus-per-node` with `--intra` and `--rate`"
        )
    found = allreduce(constants.cluster, algorithm, Shape.of(workers, constants.cluster.gpus), task.moved)
    carriers = Carriers(link=found.between, inside=found.inside)
    return Way(
        latency=found.latency,
        own_by=carriers,
    )


def _mean_and_step(constants: Constants, task: Task, workers: int, copies: int, part: float) -> float:
    """Returns the time to copy, average and step a part."""
    copying = copies * task.nbytes * constants.copy * task.crowd(workers, constants) if workers > 1 else 0.0
    return copying + part * own_step(constants, task, workers)


def hub(
    constants: Constants, task: Task, workers: int, servers: int, wire: str, *, steps: bool, shows: bool
) -> Way:
    """Returns a push and a pull through k servers on hosts of their own, in slices of the best size.

    Args:
        constants: Of the machine.
        task: What is exchanged.
        workers: Number of workers, which decides the best slices and the share of cores.
        servers: Number of shards.
        wire: Wire to them.
        steps: The servers step; else the workers step after the exchange.
        shows: Workers read parameters in the server's shared memory, as in bsp. Else an answer is a copy.
    """
    if wire == "shm":
        return _in_memory(constants, task, workers, servers, steps=steps, shows=shows and steps)
    size = task.slice_bytes or _chosen(constants, task, workers, servers, wire)
    return _by_wire(constants, task, workers, servers, wire, size, steps=steps)


def _chosen(constants: Constants, task: Task, workers: int, servers: int, name: str) -> int:
    """Returns the size that the workers' trial chooses (`hubring.workers.communicators.slice_tuning`)."""
    nbytes, sizes = slicing.trial(task.nbytes, task.tensors)
    if (
        task.traffic != 1.0 or len(sizes) == 1
    ):  # compressed slices are so short that their size hardly matters
        return sizes[0]
    pull = _pull(constants, task, workers, servers, name)
    _, part = slicing.probe(task.nbytes, servers, task.tensors)
    if slice_sizes.turn_seconds(len(sizes), pull, part) > slice_sizes.BUDGET:
        return sizes[0]
    # The trial exchanges means, without a step and without a model in between.
    tensors = () if nbytes < task.nbytes else task.tensors
    tried = replace(task, nbytes=nbytes, tensors=tensors, pause=0.0)
    exchange = partial(_by_wire, constants, tried, workers, servers, name, steps=False)
    return fastest({size: replace(exchange(size), after=0.0).lockstep(workers) for size in sizes})


def _pull(constants: Constants, task: Task, workers: int, servers: int, name: str) -> float:
    """Returns the seconds in which all workers pull the trial's largest slice of every server."""
    wire = constants.wire(name)
    pieces, _ = slicing.probe(task.nbytes, servers, task.tensors)
    own = sum(pieces) * a_byte(wire, task.link, sharing=task.sharing).seconds
    lines = min(workers, SERVER_LINES.get(name, 1))
    shared = workers * max(pieces) * seconds_a_byte(wire, task.link, lines)
    cores = _core_seconds(constants, task, wire.cpu) * workers * sum(pieces) / task.moved
    return max(own, shared, cores) + 2 * (wire.alpha + task.latency)


def _by_wire(
    constants: Constants, task: Task, workers: int, servers: int, name: str, slice_bytes: int, *, steps: bool
) -> Way:
    wire, found = constants.wire(name), task.cut(servers, slice_bytes)
    lines = min(workers, SERVER_LINES.get(name, 1))
    own = a_byte(wire, task.link, sharing=task.sharing).times(task.moved)
    shared = a_byte(wire, task.link, lines).times(found.part * task.moved)
    step = _closing(constants, task, steps=steps)
    serving = _serving(constants, task, servers, found, step)
    return Way(
        shared=shared.seconds,
        serve=serving.worker,
        close=serving.round,
        slices=found.slices,
        latency=2 * (wire.alpha + task.latency) + task.incast(workers, found.part * task.moved),
        jitter=task.jitter,
        after=0.0 if steps else own_step(constants, task, workers),
        cores=_core_seconds(constants, task, 2 * wire.cpu + constants.reduce),
        closing=_core_seconds(constants, task, step - constants.reduce),
        own_by=own,
        shared_by=shared,
        burst=task.burst,
        pause=task.pause,
        spread=spread(found.part * task.moved, task.link),
    )


def _in_memory(
    constants: Constants, task: Task, workers: int, servers: int, *, steps: bool, shows: bool
) -> Way:
    # Slices go to no more shards than the machine has cores, because more would only take turns.
    servers = min(servers, constants.cores)
    size = task.slice_bytes or slicing.in_memory(task.nbytes, servers, task.tensors)
    found = task.cut(servers, size)
    step = _closing(constants, task, steps=steps)
    serving = _serving(constants, task, servers, found, step)
    copying = 0.0 if shows else task.nbytes * constants.copy * task.crowd(workers, constants)
    return Way(
        serve=serving.worker,
        close=serving.round,
        slices=found.slices,
        latency=2 * constants.wire("shm").alpha,
        after=copying + (0.0 if steps else own_step(constants, task, workers)),
        cores=_core_seconds(constants, task, constants.reduce),
        closing=_core_seconds(constants, task, step - constants.reduce),
    )


def _closing(constants: Constants, task: Task, *, steps: bool) -> float:
    """Returns the seconds in which a server ends a round for one byte: it steps, or copies the mean."""
    return constants.step(task.optimizer) if steps else constants.copy


def _core_seconds(constants: Constants, task: Task, each: float) -> float:
    """Returns the time of all cores for a worker's bytes, of which one takes `each` seconds."""
    return max(0.0, each) * task.moved / constants.cores if task.together else 0.0


class _Serving(NamedTuple):
    """Compute of the busiest server: for each worker, and for a round."""

    worker: float
    round: float


def _serving(constants: Constants, task: Task, servers: int, found: Cut, step: float) -> _Serving:
    """Returns the busiest server's compute. Of n gradients n-1 are added, and the step reads the sum."""
    load = task.nbytes * found.part * task.crowd(servers, constants)
    return _Serving(
        load * constants.reduce + found.count * constants.serve,
        load * max(0.0, step - constants.reduce),
    )


def colocated(constants: Constants, task: Task, workers: int, wire: str, *, steps: bool) -> Way:
    """Returns a hub with its shards on the workers' hosts: the ring's bytes in the hub's two hops.

    Each way, a host's link carries its worker's pushes to other shards and its shard's answers to other
    workers: (n-1)/n of the model each. Both share the link, so their times add up.
    """
    line = constants.wire(wire)
    share = 2 * (workers - 1) / workers
    found = task.cut(workers, task.slice_bytes or slice_sizes.SIZES[0])
    carriers = a_byte(line, task.link, sharing=task.sharing).times(share * task.moved)
    step = _closing(constants, task, steps=steps)
    serving = _serving(constants, task, workers, found, step)
    return Way(
        serve=serving.worker,
        close=serving.round,
        slices=found.slices,
        latency=2 * (line.alpha + task.latency),
        jitter=task.jitter,
        after=0.0 if steps else own_step(constants, task, workers),
        cores=_core_seconds(constants, task, share * line.cpu + constants.reduce),
        closing=_core_seconds(constants, task, step - constants.reduce),
        own_by=carriers,
        burst=task.burst,
        pause=task.pause,
    )

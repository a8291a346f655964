"""Formulas of a step's exchange; exact if all workers are alike and begin together.

M: bytes of the model, B: bytes per second of a host's link each way, n: workers, k: servers.

| topology | bytes at line rate | why |
| --- | --- | --- |
| ring | 2(n-1)/n M/B + 2(n-1) alpha | 2(n-1) rounds of M/n (Patarasuk and Yuan, JPDC 2009) |
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

from math import inf

from msgspec import Struct

from hubring.workers.compare.cost.model.constants import Constants
from hubring.workers.compare.cost.model.exchange_terms import Way, seconds_a_byte, slices
from hubring.workers.compare.experiment.setting import Link

SLICE_BYTES = (4 << 20, 1 << 20, 2 << 20, 8 << 20)
"""Sizes from which a hub's workers take the best for a wire (`hubring.workers.communicators.slice_tuning`).
In shared memory a slice is a bucket, as large as the first size; a single larger tensor, whose slices are
larger there, is not modelled."""
SERVER_LINES = {"zmq": 2}
"""Connections whose bytes a server moves at once, each in its own thread; 1 for any other wire."""
TRIAL_BYTES, TRIAL_EXCHANGES, TRIAL_SECONDS = 32 << 20, 4, 2.0
"""Bytes and number of trials of each size, and their time limit. Beyond the limit the first size is used."""
GAIN = 0.05
"""Relative gain that another size needs over the first."""


class Task(Struct, frozen=True, kw_only=True):
    """What is exchanged, and where.

    Attributes:
        nbytes: Bytes of the parameters.
        optimizer: Optimizer of the parameters.
        link: Link of each host; None: limited only by the machine.
        together: All hosts share one machine's cores.
        slice_bytes: Bytes of a slice; None: the best size that workers find.
    """

    nbytes: int
    optimizer: str = "sgd"
    link: Link | None = None
    together: bool = False
    slice_bytes: int | None = None

    @property
    def latency(self) -> float:
        return 0.0 if self.link is None else self.link.latency

    @property
    def jitter(self) -> float:
        return 0.0 if self.link is None else self.link.jitter

    def crowd(self, processes: int, constants: Constants) -> float:
        """Returns the slowdown of each process if `processes` compute at once."""
        return max(1.0, processes / constants.cores) if self.together else 1.0


def own_step(constants: Constants, task: Task, workers: int) -> float:
    """Returns the time of the optimizer's step if every worker steps."""
    return task.nbytes * constants.step(task.optimizer) * task.crowd(workers, constants)


def ring(constants: Constants, task: Task, workers: int) -> Way:
    """Returns an allreduce around the ring with each worker's step; `Way.lockstep(1)` is its time.

    Holds for the bandwidth-optimal ring, which Gloo uses: pieces of M/n go around twice minus one hop each,
    and the next piece arrives while one is added. All n links are equally busy.
    """
    hops, wire = 2 * (workers - 1), constants.wire("gloo")
    moved = hops / workers * task.nbytes
    return Way(
        own=moved * seconds_a_byte(wire, task.link),
        shared=0.0,
        serve=0.0,
        close=0.0,
        slices=inf,
        # A hop waits for the later of two neighbours; the mean of that is a third of the jitter.
        latency=hops * (wire.alpha + task.latency + task.jitter / 3),
        after=_mean_and_step(constants, task, workers),
        cores=workers * moved * wire.cpu / constants.cores if task.together else 0.0,
    )


def _mean_and_step(constants: Constants, task: Task, workers: int) -> float:
    """Returns the time to average and step. Gloo sums, so the division is another pass over the gradients."""
    dividing = task.nbytes * constants.copy * task.crowd(workers, constants) if workers > 1 else 0.0
    return dividing + own_step(constants, task, workers)


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
    default, *others = (
        _by_wire(constants, task, workers, servers, wire, size, steps=steps)
        for size in _sizes(constants, task, workers, servers, wire)
    )
    best = min((default, *others), key=lambda way: way.lockstep(workers))
    return best if best.lockstep(workers) < (1 - GAIN) * default.lockstep(workers) else default


def _sizes(constants: Constants, task: Task, workers: int, servers: int, wire: str) -> tuple[int, ...]:
    """Returns the slice sizes to try: a single one if it is set or if trying takes too long."""
    if task.slice_bytes is not None:
        return (task.slice_bytes,)
    a_byte = max(1.0, workers / servers) * seconds_a_byte(constants.wire(wire), task.link)
    trial = len(SLICE_BYTES) * TRIAL_EXCHANGES * min(task.nbytes, TRIAL_BYTES) * a_byte
    return SLICE_BYTES[:1] if trial > TRIAL_SECONDS else SLICE_BYTES


def _by_wire(
    constants: Constants, task: Task, workers: int, servers: int, name: str, slice_bytes: int, *, steps: bool
) -> Way:
    wire = constants.wire(name)
    most, part = slices(task.nbytes, servers, slice_bytes)
    a_byte = seconds_a_byte(wire, task.link)
    served = seconds_a_byte(wire, task.link, min(workers, SERVER_LINES.get(name, 1)))
    step = constants.step(task.optimizer) if steps else constants.copy
    working = _core_seconds(constants, task, 2 * wire.cpu + constants.reduce)
    return Way(
        own=task.nbytes * a_byte,
        shared=part * task.nbytes * served,
        slices=most,
        latency=2 * (wire.alpha + task.latency),
        jitter=task.jitter,
        after=0.0 if steps else own_step(constants, task, workers),
        cores=working,
        closing=_core_seconds(constants, task, step - constants.reduce),
        **_serving(constants, task, servers, most, part, step),
    )


def _in_memory(
    constants: Constants, task: Task, workers: int, servers: int, *, steps: bool, shows: bool
) -> Way:
    most, part = slices(task.nbytes, servers, task.slice_bytes or SLICE_BYTES[0])
    step = constants.step(task.optimizer) if steps else constants.copy
    copying = 0.0 if shows else task.nbytes * constants.copy * task.crowd(workers, constants)
    return Way(
        own=0.0,
        shared=0.0,
        slices=most,
        latency=2 * constants.wire("shm").alpha,
        after=copying + (0.0 if steps else own_step(constants, task, workers)),
        cores=_core_seconds(constants, task, constants.reduce),
        closing=_core_seconds(constants, task, step - constants.reduce),
        **_serving(constants, task, servers, most, part, step),
    )


def _core_seconds(constants: Constants, task: Task, a_byte: float) -> float:
    return max(0.0, a_byte) * task.nbytes / constants.cores if task.together else 0.0


def _serving(
    constants: Constants, task: Task, servers: int, most: int, part: float, step: float
) -> dict[str, float]:
    """Returns the busiest server's compute. Of n gradients n-1 are added, and the step reads the sum."""
    load = task.nbytes * part * task.crowd(servers, constants)
    return {
        "serve": load * constants.reduce + most * constants.serve,
        "close": load * max(0.0, step - constants.reduce),
    }


def colocated(constants: Constants, task: Task, workers: int, wire: str, *, steps: bool) -> Way:
    """Returns a hub with its shards on the workers' hosts: the ring's bytes in the hub's two hops.

    Each way, a host's link carries its worker's pushes to other shards and its shard's answers to other
    workers: (n-1)/n of the model each. Both share the link, so their times add up.
    """
    line = constants.wire(wire)
    moved = 2 * (workers - 1) / workers * task.nbytes
    most, part = slices(task.nbytes, workers, task.slice_bytes or SLICE_BYTES[0])
    step = constants.step(task.optimizer) if steps else constants.copy
    return Way(
        own=moved * seconds_a_byte(line, task.link),
        shared=0.0,
        slices=most,
        latency=2 * (line.alpha + task.latency),
        jitter=task.jitter,
        after=0.0 if steps else own_step(constants, task, workers),
        cores=_core_seconds(constants, task, 2 * (workers - 1) / workers * line.cpu + constants.reduce),
        closing=_core_seconds(constants, task, step - constants.reduce),
        **_serving(constants, task, workers, most, part, step),
    )

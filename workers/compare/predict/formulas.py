"""Formulas of a step's exchange; exact if all workers are alike and begin together.

M: bytes of the model, B: bytes per second of a host's link each way, n: workers, k: servers.

| topology | bytes at line rate | why |
| --- | --- | --- |
| ring | 2(n-1)/n M/B + `ring_rounds` | 2(n-1) rounds of M/n (Patarasuk and Yuan, JPDC 2009) |
| fsdp2, zero1 | 4(n-1)/n and 3(n-1)/n M/B + `ring_rounds` | more passes around the ring (`Shards`) |
| hub, k hosts of its own | max(1, n/k) M/B + 2 alpha | a server's link carries n M/k each way at once |
| hub, colocated | 2(n-1)/n M/B + 2 alpha | a host carries (n-1)/n M for its worker and for its shard |
| the same, one slice | 2(n-1) M/B + 2 alpha | it comes to its shard n-1 times, then leaves as often |
| one machine | copies / cores | loopback is no wire: the processors move the bytes |

So with equal links a hub with separate servers wins when k > n^2/(2(n-1)), about n/2 (Jiang et al., "BytePS",
OSDI 2020). A formula with max() holds if links and processors work at the same time. Slices ensure that; how
well depends on their number (`hubring.workers.compare.predict.exchange_terms`).

On one machine the hosts share cores, whatever links connect them. No exchange is faster than its total
processor time divided by the number of cores.
"""

from __future__ import annotations

from math import ceil, log2

from msgspec import Struct
from msgspec.structs import replace

from hubring.ps.core.errors import UsageError
from hubring.ps.core.timing import fastest
from hubring.workers.communicators import slice_sizes
from hubring.workers.compare.predict import slicing
from hubring.workers.compare.predict.calibrations import Constants
from hubring.workers.compare.predict.exchange_terms import (
    ExchangeTask,
    HubExchange,
    TransferSeconds,
    a_byte,
    spread,
)
from hubring.workers.compare.predict.nccl import Algorithm, ClusterShape, allreduce
from hubring.workers.compare.predict.slicing import Cut

SERVER_LINES = {"zmq": 2}
"""Connections whose bytes a server moves at once, each in its own thread; 1 for any other wire."""


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

    def parts(self, task: ExchangeTask, workers: int) -> tuple[float, float]:
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

SEGMENTS, SEGMENT_BYTES = 2, 1 << 20
"""Segments into which Gloo cuts a rank's piece of an allreduce: at least so many, of at most so many bytes.
Two are on their way at once."""


class ExchangeCosts(Struct, frozen=True):
    """What a task's exchange costs, by how it is made.

    Attributes:
        constants: Of the machine.
        task: What is exchanged.
        workers: Number of workers.
    """

    constants: Constants
    task: ExchangeTask
    workers: int

    def ring(self, shards: Shards = WHOLE) -> HubExchange:
        """Returns an allreduce around the ring with each worker's step; its time is `HubExchange.alone`.

        With `shards`, it is what they exchange instead of an allreduce, and their part of the step.

        Holds for the bandwidth-optimal ring, which Gloo uses: pieces of M/n go around twice minus one hop
        each, and the next piece arrives while one is added. All n links are equally busy.
        """
        task, workers, wire = self.task, self.workers, self.constants.wire("gloo")
        least, most = shards.parts(task, workers)
        # Of a broadcast, links are busiest where the largest part leaves, in a tree, or the others arrive.
        levels = ceil(log2(workers)) if shards.broadcast else 0
        spread_out = max(levels * most, 1 - least) if levels else 0.0
        passing = shards.passes * (workers - 1) / workers
        moved = (passing + spread_out) * task.moved
        # A ring enters and leaves each host once, however many of its workers are there.
        carrying = a_byte(wire, task.link)
        # Gloo sums in segments of a limited size, and gathers in two of any size.
        passes = ((shards.passes - shards.gathers, SEGMENT_BYTES), (shards.gathers, task.nbytes))
        around = [self._ring_rounds(*each, wire.alpha, carrying.seconds) for each in passes]
        # The receivers of a broadcast all say at once that they wait.
        down = levels * (wire.alpha + task.link.latency) + task.link.latency if levels else 0.0
        copying = shards.copies * self._by_each_worker(self.constants.copy) if workers > 1 else 0.0
        return HubExchange(
            latency=sum(around) + down,
            after=copying + most * self._by_each_worker(self.constants.step(task.optimizer)),
            cores=self._core_seconds(workers * (passing + spread_out) * wire.cpu),
            own_by=carrying.times(moved),
            burst=task.burst,
            overlapping=passing / (passing + spread_out) if shards.overlaps and passing else 0.0,
        )

    def _ring_rounds(self, passes: int, most: int, alpha: float, byte_seconds: float) -> float:
        """Returns what the round trips of passes around a ring add to the time of their bytes.

        The whole model counts as one group. With several groups each has its own round trips, and backward
        hides those of all but the last.

        Gloo sends a segment once its receiver has said that it waits, so a segment takes a round trip and its
        time on the link. While one travels, another is sent. So two segments take twice their time on the
        link, or else a round trip and the time of one. Each pass starts again. Between two ranks, what one
        says waits behind its other segment in the same connection, so nothing hides a round trip. While an
        emulated link waits, its bucket fills, so that segments pass at once.

        Args:
            passes: Passes of the model.
            most: Most bytes of a segment.
            alpha: Seconds of a hop of a small message on one machine, with its announcement.
            byte_seconds: Seconds of a byte on a host's link.
        """
        task, workers = self.task, self.workers
        if workers == 1 or not passes:
            return 0.0
        # Simulated rings of 2 to 16 ranks are late by a third of the jitter at each hop.
        round_trip = alpha + 2 * task.link.latency + task.link.jitter / 3
        piece = task.moved / workers
        segments = max(SEGMENTS, ceil(piece / most))
        turns = (workers - 1) * segments / 2
        passing = max(0.0, piece / segments * byte_seconds - task.burst)
        moving = passes * (workers - 1) * piece * byte_seconds
        whole = passes * (turns * (round_trip + passing) + passing)
        stalls = passes * (turns if workers == 2 else 1)
        # `HubExchange.through` subtracts one burst, as if the bucket filled only before the first pass.
        stalled = round_trip + (stalls - 1) * max(0.0, round_trip - task.burst)
        return max(stalled, whole - moving + min(task.burst, moving))

    def nccl(self, algorithm: Algorithm) -> HubExchange:
        """Returns an allreduce of NCCL on a cluster; `lockstep(1)` is its time. Steps belong to compute.

        Raises:
            UsageError: The calibration has no cluster, or it lacks what the number of workers needs.
        """
        cluster = self.constants.cluster
        if cluster is None:
            raise UsageError(
                "the calibration has no GPUs; for rows of nccl use `--calibration h100`, `--calibration` with"
                " the output of nccl-tests, or `--gpus-per-node` with `--intra` and `--rate`"
            )
        found = allreduce(cluster, algorithm, ClusterShape.of(self.workers, cluster.gpus), self.task.moved)
        carried = TransferSeconds(link=found.between, inside=found.inside)
        return HubExchange(latency=found.latency, own_by=carried)

    def hub(self, servers: int, wire: str, *, steps: bool, shows: bool) -> HubExchange:
        """Returns a push and a pull through k servers on hosts of their own, in slices of the best size.

        Args:
            servers: Number of shards.
            wire: Wire to them.
            steps: The servers step; else the workers step after the exchange.
            shows: Workers read parameters in the server's shared memory, as in bsp. Else an answer is a copy.
        """
        if wire == "shm":
            return self._in_memory(servers, steps=steps, shows=shows and steps)
        return self._by_wire(servers, wire, self.task.slice_bytes or self._chosen(servers, wire), steps=steps)

    def _chosen(self, servers: int, name: str) -> int:
        """Returns the size that the workers' trial chooses (`hubring.workers.communicators.slice_tuning`)."""
        task = self.task
        nbytes, sizes = slicing.trial(task.nbytes, task.tensors)
        if task.traffic != 1.0 or len(sizes) == 1:  # of compressed slices, the size hardly matters
            return sizes[0]
        pieces, part = slicing.probe(task.nbytes, servers, task.tensors)
        if slice_sizes.turn_seconds(len(sizes), self._pull(pieces, name), part) > slice_sizes.BUDGET:
            return sizes[0]
        # The trial exchanges means, without a step and without a model in between.
        tensors = () if nbytes < task.nbytes else task.tensors
        tried = replace(self, task=replace(task, nbytes=nbytes, tensors=tensors))
        exchanges = {size: tried._by_wire(servers, name, size, steps=False) for size in sizes}
        return fastest({size: replace(e, after=0.0).lockstep(self.workers) for size, e in exchanges.items()})

    def _pull(self, pieces: list[int], name: str) -> float:
        """Returns the seconds in which all workers pull the trial's largest slice of every server."""
        task, workers, wire = self.task, self.workers, self.constants.wire(name)
        own = sum(pieces) * a_byte(wire, task.link, sharing=task.sharing).seconds
        shared = workers * max(pieces) * a_byte(wire, task.link, self._lines(name)).seconds
        cores = self._core_seconds(wire.cpu) * workers * sum(pieces) / task.moved
        return max(own, shared, cores) + 2 * (wire.alpha + task.link.latency)

    def _lines(self, name: str) -> int:
        """Returns the connections whose bytes a server moves at once."""
        return min(self.workers, SERVER_LINES.get(name, 1))

    def _by_wire(self, servers: int, name: str, slice_bytes: int, *, steps: bool) -> HubExchange:
        task, wire = self.task, self.constants.wire(name)
        found = task.cut(servers, slice_bytes)
        way = self._wired(servers, name, found, (1.0, found.part), 2 * wire.cpu, steps=steps)
        return replace(way, latency=way.latency + task.incast(self.workers, found.part * task.moved))

    def _wired(
        self, servers: int, name: str, found: Cut, shares: tuple[float, float], moving: float, *, steps: bool
    ) -> HubExchange:
        """Returns a hub over a wire.

        Args:
            servers: Number of shards.
            name: The wire.
            found: The busiest server's part.
            shares: Bytes that a worker's host moves over its own link each way, and over that of the busiest
                server, as shares of the model.
            moving: As in `_served`.
            steps: As in `_served`.
        """
        task, wire = self.task, self.constants.wire(name)
        return replace(
            self._served(servers, found, moving, steps=steps),
            latency=2 * (wire.alpha + task.link.latency),
            jitter=task.link.jitter,
            own_by=a_byte(wire, task.link, sharing=task.sharing).times(shares[0] * task.moved),
            shared_by=a_byte(wire, task.link, self._lines(name)).times(shares[1] * task.moved),
            spread=spread(found.part * task.moved, task.link),
            burst=task.burst,
        )

    def _in_memory(self, servers: int, *, steps: bool, shows: bool) -> HubExchange:
        # Slices go to no more shards than the machine has cores, because more would only take turns.
        task, servers = self.task, min(servers, self.constants.cores)
        size = task.slice_bytes or slicing.in_memory(task.nbytes, servers, task.tensors)
        served = self._served(servers, task.cut(servers, size), 0.0, steps=steps)
        after = served.after if shows else self._by_each_worker(self.constants.copy) + served.after
        return replace(served, latency=2 * self.constants.wire("shm").alpha, after=after)

    def colocated(self, name: str, *, steps: bool) -> HubExchange:
        """Returns a hub with its shards on the workers' hosts: the ring's bytes in the hub's two hops.

        Each way, a host's link carries its worker's pushes to other shards and its shard's answers to other
        workers. Both share the link, so their times add up. With even parts they are (n-1)/n of the model
        each. The host of the largest part p carries (n-1)p for its shard and 1-p for its worker, and the last
        slice's answers wait for its pushes. So a model of one slice takes 2(n-1) times its bytes.
        """
        workers, others = self.workers, self.workers - 1
        found = self.task.cut(workers, self.task.slice_bytes or slice_sizes.SIZES[0])
        # `HubExchange.through` adds the time of the first slice.
        own = 1 - found.part + others * found.part * (1 - 1 / found.slices)
        moving = 2 * others / workers * self.constants.wire(name).cpu
        return self._wired(workers, name, found, (own, others / workers * found.part), moving, steps=steps)

    def _served(self, servers: int, found: Cut, moving: float, *, steps: bool) -> HubExchange:
        """Returns what a hub computes, without what the bytes take on their way.

        Args:
            servers: Number of shards.
            found: The busiest server's part.
            moving: Processor seconds to move a worker's byte there and back.
            steps: The servers step; else they copy the mean, and the workers step.
        """
        task, constants = self.task, self.constants
        # Of n gradients n-1 are added, and the step reads the sum.
        closing = (constants.step(task.optimizer) if steps else constants.copy) - constants.reduce
        load = task.nbytes * found.part * task.crowd(servers, constants)
        return HubExchange(
            serve=load * constants.reduce + found.count * constants.serve,
            close=load * max(0.0, closing),
            slices=found.slices,
            after=0.0 if steps else self._by_each_worker(self.constants.step(task.optimizer)),
            cores=self._core_seconds(moving + constants.reduce),
            closing=self._core_seconds(closing),
        )

    def two_levels(self, servers: int, wire: str, *, steps: bool) -> HubExchange:
        """Returns an exchange of hosts whose workers reduce among themselves first.

        Each host is one worker of a hub or ring, whose gradients and answers pass the host's memory as in an
        exchange of its own. Its workers divide what the host moves, and what it costs.

        Args:
            servers: Number of shards; 0: a ring.
            wire: Wire between hosts.
            steps: The servers step.
        """
        task = self.task
        hosts = ceil(self.workers / task.sharing)
        between = replace(self, workers=hosts, task=replace(task, sharing=1))
        way = between.hub(servers, wire, steps=steps, shows=False) if servers else between.ring()
        within = replace(self, workers=task.sharing).hub(task.sharing, "shm", steps=False, shows=False)
        share = hosts / self.workers if servers else 1.0
        return replace(
            way,
            shared_by=way.shared_by.times(share),
            serve=way.serve * share,
            cores=way.cores * share,
            latency=way.latency + replace(within, after=0.0).lockstep(task.sharing),
        )

    def _by_each_worker(self, each: float) -> float:
        """Returns the time of all bytes at every worker, of which one takes `each` seconds."""
        return each * self.task.nbytes * self.task.crowd(self.workers, self.constants)

    def _core_seconds(self, each: float) -> float:
        """Returns the time of all cores for a worker's bytes, of which one takes `each` seconds."""
        return max(0.0, each) * self.task.moved / self.constants.cores if self.task.together else 0.0

"""What is exchanged, and its load on links and processors: the terms of both formula and simulation.

An exchange is a flow of slices through links and processors that all work at the same time. So its time is
that of the busiest of them plus the passage of the first slice, not the sum over all.

Incast: where a switch's buffer overflows, TCP repeats what was dropped. The link stays busy meanwhile, so
only the end of the exchange is late: by half the time of a full buffer, a rough estimate. Four workers with
1 MiB each and a buffer of 100 ms at 200 Mbit/s took 12 % longer than without drops; this
rule gives 14 %. If a worker's share of the buffer is less than a few segments, it loses whole windows and
waits for TCP's timer (Phanishayee et al., "Measurement and analysis of TCP throughput collapse", FAST 2008).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from math import inf, log2

from msgspec import Struct
from msgspec.structs import astuple

from hubring.workers.compare.plan.setting import BURST_BYTES, LINE_BYTES, PAYLOAD_BYTES, Link
from hubring.workers.compare.predict.calibrations import Constants, WireCosts
from hubring.workers.compare.predict.slicing import Cut, cut

FORMULA = "k > n^2/(2(n-1))"
"""Servers k with which the hub beats the ring of n workers, if all links are alike and only bytes count.
A ring moves 2(n-1)/n of the model each way in a step, a server max(1, n/k)."""


def servers_needed(workers: int, sharing: int = 1) -> int | None:
    """Returns the fewest servers with which the hub wins by the formula; None if it never wins.

    Args:
        workers: Number of workers.
        sharing: Workers of each host, which share its link. A hub's workers push and pull the model each, and
            a ring passes each host once.
    """
    # Beyond k = n / sharing the workers' own link is the limit: `sharing` models, and below 2 with a ring.
    return None if workers <= 2 or sharing >= 2 else math.floor(workers**2 / (2 * (workers - 1))) + 1


def with_servers(least: float | None) -> str:
    """Returns from how many servers on something holds, in words; None: for no number."""
    return "with no number of servers" if least is None else f"with {least:g} or more servers"


def most_servers(workers: int) -> int:
    """Returns the largest number of servers to try for a crossing; with more, no link carries less.

    The server with the most slices is the limit. With twice as many servers as workers it carries no more
    than a worker's own link, for any number of slices that is at least the number of workers.
    """
    return 2 * workers


def overtaking(hub: Callable[[int], float], ring: float, workers: int) -> int | None:
    """Returns from how many servers up to `most_servers` the hub's step is always shorter; None: from none.

    Args:
        hub: Returns the seconds of its step for a number of servers.
        ring: Seconds of the ring's step.
        workers: Of both.
    """
    # More servers can be slower again, for example if one gets an extra slice: a first win is no crossing.
    most = most_servers(workers)
    last_lost = next((servers for servers in range(most, 0, -1) if hub(servers) >= ring), 0)
    return None if last_lost == most else last_lost + 1


SPREAD, FIRST_BYTES = 0.4, 14_480
"""`HubExchange.spread` of workers whose connections still accelerate, and the bytes with which TCP begins.
Behind emulated links of 20 and 100 Mbit/s with 5 ms it was 0.3 to 0.5 where all of a message was sent
meanwhile, and 0 to 0.6 where a quarter was (two to eight workers, one run of each, beside other programs)."""


class TransferSeconds(Struct, frozen=True):
    """Seconds that a host takes to move bytes each way, by what moves them; all work at the same time.

    Attributes:
        link: Its link, at the link's rate.
        thread: The I/O threads of its end of the connections, as fast as those of the calibrated host.
        inside: Links between the GPUs of a node.
    """

    link: float = 0.0
    thread: float = 0.0
    inside: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.link, self.thread, self.inside)

    def times(self, factor: float) -> TransferSeconds:
        return TransferSeconds(*(seconds * factor for seconds in astuple(self)))

    def beside(self, other: TransferSeconds) -> TransferSeconds:
        """Returns the larger of each."""
        return TransferSeconds(*map(max, astuple(self), astuple(other)))


class HubExchange(Struct, frozen=True, kw_only=True):
    """One exchange of a whole model by one worker through a hub, in seconds.

    Attributes:
        own_by: Time of its own link and I/O threads, each way.
        shared_by: Time of the busiest server's link and I/O threads, each way.
        serve: Compute of that server for this worker.
        close: Compute of that server for a round, for any number of workers.
        slices: Number of slices of that server's part; infinite without answers.
        latency: Latency there and back, as far as no bytes move meanwhile.
        jitter: Variation of the latency one way.
        after: Work of the worker after the exchange: its own step, a copy.
        cores: Time of all cores together for this worker; 0 if each host has its own cores.
        closing: Time of all cores together for a round; 0 likewise.
        burst: Time of the bytes that a link passes at once after a pause.
        spread: Share of the last slice's way to all workers by which the first of them is ahead.
        overlapping: Share of the bytes whose exchange can overlap with backward.
    """

    own_by: TransferSeconds = TransferSeconds()
    shared_by: TransferSeconds = TransferSeconds()
    serve: float = 0.0
    close: float = 0.0
    slices: float = inf
    latency: float = 0.0
    jitter: float = 0.0
    after: float = 0.0
    cores: float = 0.0
    closing: float = 0.0
    burst: float = 0.0
    spread: float = 0.0
    overlapping: float = 1.0

    @property
    def own(self) -> float:
        """Time of its own link or I/O thread, each way."""
        return self.own_by.seconds

    @property
    def shared(self) -> float:
        """Time of the busiest server's link or I/O thread, each way."""
        return self.shared_by.seconds

    @property
    def bottleneck(self) -> float:
        """Load of one exchange on the busiest shared resource, if each exchange is its own round."""
        return max(self.shared, self.serve + self.close, self.cores + self.closing)

    @property
    def alone(self) -> float:
        """Time of the exchange without other workers."""
        return self.lockstep(1)

    def moving(self, workers: int) -> float:
        """Returns the time of the busiest link, each way, if `workers` exchange."""
        return max(self.own, workers * self.shared)

    def serving(self, workers: int) -> float:
        """Returns the compute of the busiest server for a round."""
        return workers * self.serve + self.close

    def working(self, workers: int) -> float:
        """Returns the time of a machine's cores for a round, if all hosts share them."""
        return workers * self.cores + self.closing

    def lockstep(self, workers: int) -> float:
        """Returns the time if `workers` begin at once and each waits for all.

        A slice enters, is computed and leaves, while the next one is a stage behind.
        """
        passing = self.through(self.moving(workers), self.serving(workers), self.working(workers), workers)
        return passing + self.latency + self.sway(workers) + self.after

    def through(self, entering: float, serving: float, working: float, workers: int) -> float:
        """Returns the time from the first byte in to the last byte out, if all stages overlap.

        The last slice is computed once it is in, and leaves once it is computed. The later stages wait for
        the first slice. Workers whose answers come early push while the others still receive, so the first
        slices arrive within less than their time on the link.

        Args:
            entering: Time until all bytes are in.
            serving: Compute of the busiest server.
            working: Time of all cores together.
            workers: Number of workers.
        """
        # A link's bucket fills while workers compute, and while bytes move the other way.
        entering, leaving = (max(0.0, each - self.burst) for each in (entering, self.moving(workers)))
        # Workers that get a burst first push while the others still receive: half of them on average.
        ahead = self.burst * (workers + 1) / 2
        behind = 1 - self.spread * (workers - 1) / workers
        first = max(0.0, behind * workers * self.shared / self.slices - ahead)
        computed = serving / self.slices
        served = max(first + serving, entering + computed)
        return max(served + first, first + computed + leaving, working + first)

    def sway(self, workers: int) -> float:
        """Returns the most that jitter adds there and back: the mean maximum of uniform draws."""
        return 2 * self.jitter * (workers - 1) / (workers + 1)


def goodput(link: Link) -> float:
    """Returns TCP payload bytes per second over a link, each way; infinite without a rate."""
    return inf if link.rate is None else link.rate / 8 * PAYLOAD_BYTES / LINE_BYTES


def a_byte(wire: WireCosts, link: Link, lines: int = 1, sharing: int = 1) -> TransferSeconds:
    """Returns the time of a byte at one host, each way.

    Args:
        wire: Constants of one connection.
        link: Link of the host.
        lines: Connections that it moves bytes of at once.
        sharing: Processes on the host that move as many bytes over its link at the same time.
    """
    return TransferSeconds(link=sharing / goodput(link), thread=wire.beta / lines)


def spread(nbytes: float, link: Link) -> float:
    """Returns `HubExchange.spread` if each worker sends `nbytes` to the server.

    Connections double their speed with each round trip until they fill the link. Meanwhile those that began
    first are ahead, so workers finish one after another; later they share the link evenly.
    """
    if link.rate is None or nbytes <= FIRST_BYTES:
        return 0.0
    accelerating = 2 * link.latency * log2(nbytes / FIRST_BYTES)
    return SPREAD * min(1.0, accelerating * goodput(link) / nbytes)


INCAST_WINDOW = 4 << 20
"""Most bytes in flight on one connection: Linux's default limit of a send buffer."""
INCAST_TIMER = 0.2
"""Seconds: Linux's shortest retransmission timer."""
INCAST_SEGMENT, FEWEST = 1448, 4
"""Bytes of a segment, and how many of them in flight let TCP repeat one without the timer."""


class ExchangeTask(Struct, frozen=True, kw_only=True):
    """What is exchanged, and where.

    Attributes:
        nbytes: Bytes of the parameters.
        optimizer: Optimizer of the parameters.
        link: Link of each host; without a rate and latency: limited only by the machine.
        together: All hosts share one machine's cores; None, of a job: they do if there is no link.
        slice_bytes: Bytes of a slice; None: the size that workers choose (`slice_sizes`).
        traffic: Bytes that are exchanged, as a share of `nbytes`.
        tensors: Bytes of each parameter in the order of registration; empty: unknown.
        sharing: Workers on each host, which share its link.
        buffer: Bytes of a switch's port; None: large enough.
    """

    nbytes: int
    optimizer: str = "sgd"
    link: Link = Link()
    together: bool | None = None
    slice_bytes: int | None = None
    traffic: float = 1.0
    tensors: tuple[int, ...] = ()
    sharing: int = 1
    buffer: float | None = None

    def incast(self, workers: int, nbytes: float) -> float:
        """Returns the seconds that dropped packets cost if workers send `nbytes` each to one server."""
        if self.link.rate is None or self.buffer is None:
            return 0.0
        room = self.buffer + self.link.rate / 8 * 2 * self.link.latency
        if workers < 2 or workers * min(nbytes, INCAST_WINDOW) <= room:
            return 0.0
        timer = INCAST_TIMER if room / workers < FEWEST * INCAST_SEGMENT else 0.0
        return self.buffer * 8 / self.link.rate / 2 + timer

    @property
    def moved(self) -> float:
        """Bytes that a worker sends to a hub."""
        return self.nbytes * self.traffic

    @property
    def burst(self) -> float:
        """Seconds that the token bucket of an emulated link saves after a pause; 0 for any other link."""
        rate = self.link.rate
        return BURST_BYTES * 8 / rate if rate is not None and self.together else 0.0

    def cut(self, servers: int, slice_bytes: int) -> Cut:
        """Returns the busiest server's part of the model."""
        return cut(self.nbytes, servers, slice_bytes, self.tensors)

    def crowd(self, processes: int, constants: Constants) -> float:
        """Returns the slowdown of each process if `processes` compute at once."""
        return max(1.0, processes / constants.cores) if self.together else 1.0

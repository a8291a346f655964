"""The load of one worker's exchange on links and processors: the terms of both formula and simulation.

An exchange is a flow of slices through links and processors that all work at the same time. So its time is
that of the busiest of them plus the passage of the first slice, not the sum over all.
"""

from __future__ import annotations

from math import inf, log2

from msgspec import Struct

from hubring.workers.compare.cost.model.constants import LINE_BYTES, PAYLOAD_BYTES, Wire
from hubring.workers.compare.experiment.setting import Link

BURST_BYTES = 128 << 10
"""Bytes that an emulated link passes at once after a pause: its token bucket, as `tc` sets it
(`hubring.workers.compare.hardship.network`)."""

SPREAD, FIRST_BYTES = 0.4, 14_480
"""`Way.spread` of workers whose connections still accelerate, and the bytes with which TCP begins. Behind
emulated links of 20 and 100 Mbit/s with 5 ms it was 0.3 to 0.5 where all of a message was sent meanwhile, and
0 to 0.6 where a quarter was (two to eight workers, one run of each, beside other programs)."""


class Carriers(Struct, frozen=True):
    """Seconds that a host takes to move bytes each way, by what moves them; all work at the same time.

    Attributes:
        link: Its link, at the link's rate.
        thread: The I/O threads of its end of the connections, as fast as those of the calibrated host.
        window: Waiting for acknowledgements, where a connection has a window.
        inside: Links between the GPUs of a node.
    """

    link: float = 0.0
    thread: float = 0.0
    window: float = 0.0
    inside: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.link, self.thread, self.window, self.inside)

    def times(self, factor: float) -> Carriers:
        return Carriers(self.link * factor, self.thread * factor, self.window * factor, self.inside * factor)

    def beside(self, other: Carriers) -> Carriers:
        """Returns the larger of each."""
        return Carriers(
            max(self.link, other.link),
            max(self.thread, other.thread),
            max(self.window, other.window),
            max(self.inside, other.inside),
        )


class Way(Struct, frozen=True, kw_only=True):
    """One exchange of a whole model by one worker through a hub, in seconds.

    Attributes:
        shared: Time of the busiest server's link or I/O thread, each way.
        serve: Compute of that server for this worker.
        close: Compute of that server for a round, for any number of workers.
        slices: Number of slices of that server's part; infinite without answers.
        latency: Latency there and back, as far as no bytes move meanwhile.
        rounds: Round trips of a ring one after another, if they last longer than its bytes.
        jitter: Variation of the latency one way.
        after: Work of the worker after the exchange: its own step, a copy.
        cores: Time of all cores together for this worker; 0 if each host has its own cores.
        closing: Time of all cores together for a round; 0 likewise.
        own_by: Time of its own link and I/O threads, each way.
        shared_by: What `shared` consists of; None: a link.
        burst: Time of the bytes that a link passes at once after a pause.
        pause: Time of a step in which no bytes move.
        spread: Share of the last slice's way to all workers by which the first of them is ahead.
        overlapping: Share of the bytes whose exchange can overlap with backward.
    """

    own_by: Carriers = Carriers()
    shared: float = 0.0
    serve: float = 0.0
    close: float = 0.0
    slices: float = inf
    latency: float
    rounds: float = 0.0
    jitter: float = 0.0
    after: float = 0.0
    cores: float = 0.0
    closing: float = 0.0
    shared_by: Carriers | None = None
    burst: float = 0.0
    pause: float = 0.0
    spread: float = 0.0
    overlapping: float = 1.0

    @property
    def own(self) -> float:
        """Time of its own link or I/O thread, each way."""
        return self.own_by.seconds

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
        """Returns the time from the first byte in to the last byte out, with what a burst saves.

        Args:
            entering: Time until all bytes are in.
            serving: Compute of the busiest server.
            working: Time of all cores together.
            workers: Number of workers.
        """
        leaving = self.moving(workers)
        plain = self.passing(entering, serving, leaving, working, workers)
        if not self.burst:
            return plain
        # A link's bucket fills while the link pauses: while workers compute, and while bytes move the other
        # way. No link carries more than its rate in the mean of all steps.
        elsewhere = self.pause + self.latency + self.after
        free = min(self.burst, max(0.0, elsewhere + plain - leaving))
        # Workers that get a burst first push while the others still receive: half of them on average.
        ahead = free * (workers + 1) / 2
        entering, rest = max(0.0, entering - free), max(0.0, leaving - free)
        saved = self.passing(entering, serving, rest, working, workers, ahead)
        return max(saved, leaving - elsewhere)

    def passing(
        self,
        entering: float,
        serving: float,
        leaving: float,
        working: float,
        workers: int,
        free: float = 0.0,
    ) -> float:
        """Returns the time from the first byte in to the last byte out, if all stages overlap.

        The last slice is computed once it is in, and leaves once it is computed. The later stages wait for
        the first slice. Workers whose answers come early push while the others still receive, so the first
        slices arrive within less than their time on the link. `free` is what a burst saves of it.
        """
        behind = 1 - self.spread * (workers - 1) / workers
        first = max(0.0, behind * workers * self.shared / self.slices - free)
        computed = serving / self.slices
        served = max(first + serving, entering + computed)
        return max(served + first, first + computed + leaving, working + first)

    def carriers(self, workers: int) -> Carriers:
        """Returns the time of the busiest of each carrier if `workers` exchange."""
        shared = Carriers(link=self.shared) if self.shared_by is None else self.shared_by
        return self.own_by.beside(shared.times(workers))

    def sway(self, workers: int) -> float:
        """Returns the most that jitter adds there and back: the mean maximum of uniform draws."""
        return 2 * self.jitter * (workers - 1) / (workers + 1)


def goodput(link: Link | None) -> float:
    """Returns TCP payload bytes per second over a link, each way; infinite without a link."""
    rate = None if link is None else link.rate
    return inf if rate is None else rate / 8 * PAYLOAD_BYTES / LINE_BYTES


def a_byte(wire: Wire, link: Link | None, lines: int = 1, sharing: int = 1) -> Carriers:
    """Returns the time of a byte at one host, each way.

    Args:
        wire: Constants of one connection.
        link: Link of the host.
        lines: Connections that it moves bytes of at once.
        sharing: Processes on the host that move as many bytes over its link at the same time.
    """
    round_trip = 2 * (0.0 if link is None else link.latency)
    waiting = round_trip / wire.window if wire.window else 0.0
    return Carriers(link=sharing / goodput(link), thread=wire.beta / lines, window=waiting / lines)


def spread(nbytes: float, link: Link | None) -> float:
    """Returns `Way.spread` if each worker sends `nbytes` to the server.

    Connections double their speed with each round trip until they fill the link. Meanwhile those that began
    first are ahead, so workers finish one after another; later they share the link evenly.
    """
    if link is None or link.rate is None or nbytes <= FIRST_BYTES:
        return 0.0
    accelerating = 2 * link.latency * log2(nbytes / FIRST_BYTES)
    return SPREAD * min(1.0, accelerating * goodput(link) / nbytes)


def seconds_a_byte(wire: Wire, link: Link | None, lines: int = 1) -> float:
    """Returns the time of a byte at one host, each way: the slowest of link, I/O threads and window."""
    return a_byte(wire, link, lines).seconds

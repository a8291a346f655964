"""The load of one worker's exchange on links and processors: the terms of both formula and simulation.

An exchange is a flow of slices through links and processors that all work at the same time. So its time is
that of the busiest of them plus the passage of the first slice, not the sum over all.
"""

from __future__ import annotations

from math import ceil, inf

from msgspec import Struct

from hubring.workers.compare.cost.model.constants import Wire
from hubring.workers.compare.experiment.setting import Link

LINE_BYTES, PAYLOAD_BYTES = 1514, 1448
"""A full Ethernet frame, and its TCP payload with timestamps."""


class Way(Struct, frozen=True, kw_only=True):
    """One exchange of a whole model by one worker through a hub, in seconds.

    Attributes:
        own: Time of its own link or I/O thread, each way.
        shared: Time of the busiest server's link or I/O thread, each way.
        serve: Compute of that server for this worker.
        close: Compute of that server for a round, for any number of workers.
        slices: Number of slices of that server's part; infinite without answers.
        latency: Latency there and back.
        jitter: Variation of the latency one way.
        after: Work of the worker after the exchange: its own step, a copy.
        cores: Time of all cores together for this worker; 0 if each host has its own cores.
        closing: Time of all cores together for a round; 0 likewise.
    """

    own: float
    shared: float
    serve: float
    close: float
    slices: float
    latency: float
    jitter: float = 0.0
    after: float = 0.0
    cores: float = 0.0
    closing: float = 0.0

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
        moving = self.moving(workers)
        passing = self.passing(moving, self.serving(workers), moving, self.working(workers), workers)
        return passing + self.latency + self.sway(workers) + self.after

    def passing(self, entering: float, serving: float, leaving: float, working: float, workers: int) -> float:
        """Returns the time from the first byte in to the last byte out, if all stages overlap.

        The last slice is computed once it is in, and leaves once it is computed. The later stages wait for
        the first slice.
        """
        first, computed = workers * self.shared / self.slices, serving / self.slices
        served = max(first + serving, entering + computed)
        return max(served + first, first + computed + leaving, working + first)

    def sway(self, workers: int) -> float:
        """Returns the most that jitter adds there and back: the mean maximum of uniform draws."""
        return 2 * self.jitter * (workers - 1) / (workers + 1)


def goodput(link: Link | None) -> float:
    """Returns TCP payload bytes per second over a link, each way; infinite without a link."""
    rate = None if link is None else link.rate
    return inf if rate is None else rate / 8 * PAYLOAD_BYTES / LINE_BYTES


def seconds_a_byte(wire: Wire, link: Link | None, lines: int = 1) -> float:
    """Returns the time of a byte at one host, each way: the slowest of link, I/O threads and window.

    Args:
        wire: Constants of one connection.
        link: Link of the host.
        lines: Connections that it moves bytes of at once.
    """
    round_trip = 2 * (0.0 if link is None else link.latency)
    waiting = round_trip / wire.window if wire.window else 0.0
    return max(1 / goodput(link), max(wire.beta, waiting) / lines)


def slices(nbytes: int, servers: int, slice_bytes: int) -> tuple[int, float]:
    """Returns the number of slices of the busiest server, and their share of the model."""
    total = max(1, ceil(nbytes / slice_bytes))
    most = ceil(total / servers)
    return most, most / total

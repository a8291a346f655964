"""What one worker's exchange asks of whom: the terms from which both formula and simulation start.

An exchange is a flow of slices through links and processors that all work at the same time. So it takes
what the busiest of them takes, and the time in which the first slice comes through; no sum over them all.
"""

from __future__ import annotations

from math import ceil, inf

from msgspec import Struct

from hubring.workers.compare.cost.model.constants import Wire
from hubring.workers.compare.experiment.setting import Link

LINE_BYTES, PAYLOAD_BYTES = 1514, 1448
"""A full Ethernet frame, and what of it TCP carries for its user, with timestamps."""


class Way(Struct, frozen=True, kw_only=True):
    """One exchange of a whole model by one worker through a hub, in seconds.

    Attributes:
        own: Its own link or I/O thread is busy, each way.
        shared: The busiest server's link or I/O thread is busy with it, each way.
        serve: That server computes for it.
        close: That server computes for a round, whoever many took part in it.
        slices: Into which that server's part is cut; infinite where nothing is answered.
        latency: Under way, there and back, with no byte's weight.
        jitter: By which one way varies.
        after: The worker does once it is over: its own step, a copy.
        cores: All cores together work for it; 0 where hosts have cores of their own.
        closing: All cores together work for a round; 0 likewise.
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
        """What one exchange takes of the busiest of all that is shared, where each is a round of its own."""
        return max(self.shared, self.serve + self.close, self.cores + self.closing)

    @property
    def alone(self) -> float:
        """What it takes where nobody else is there."""
        return self.lockstep(1)

    def moving(self, workers: int) -> float:
        """What the busiest link needs, each way, where so many exchange."""
        return max(self.own, workers * self.shared)

    def serving(self, workers: int) -> float:
        """What the busiest server computes for a round."""
        return workers * self.serve + self.close

    def working(self, workers: int) -> float:
        """What a machine's cores need for a round where all hosts share them."""
        return workers * self.cores + self.closing

    def lockstep(self, workers: int) -> float:
        """What it takes where so many begin at once and each waits for all.

        A slice goes in, is computed, and goes out, while the next one is a stage behind.
        """
        moving = self.moving(workers)
        passing = self.passing(moving, self.serving(workers), moving, self.working(workers), workers)
        return passing + self.latency + self.sway(workers) + self.after

    def passing(self, entering: float, serving: float, leaving: float, working: float, workers: int) -> float:
        """From the first byte in to the last one out, where each stage takes so long and all overlap.

        The last slice is computed when it is in, and goes out when it is computed; the first one's way
        keeps the later stages waiting.
        """
        first, computed = workers * self.shared / self.slices, serving / self.slices
        served = max(first + serving, entering + computed)
        return max(served + first, first + computed + leaving, working + first)

    def sway(self, workers: int) -> float:
        """The most that jitter adds there and back: of so many even draws, the largest on average."""
        return 2 * self.jitter * (workers - 1) / (workers + 1)


def goodput(link: Link | None) -> float:
    """Bytes a second that TCP brings its user over a link, each way; infinite without one."""
    rate = None if link is None else link.rate
    return inf if rate is None else rate / 8 * PAYLOAD_BYTES / LINE_BYTES


def seconds_a_byte(wire: Wire, link: Link | None, lines: int = 1) -> float:
    """Of one host, each way: by the slowest of its link, its I/O threads, and a window's round trips.

    Args:
        wire: What was measured of one line.
        link: The host's.
        lines: That it moves bytes of at once.
    """
    round_trip = 2 * (0.0 if link is None else link.latency)
    waiting = round_trip / wire.window if wire.window else 0.0
    return max(1 / goodput(link), max(wire.beta, waiting) / lines)


def slices(nbytes: int, servers: int, slice_bytes: int) -> tuple[int, float]:
    """How many slices the busiest server has, and what part of the model they are."""
    total = max(1, ceil(nbytes / slice_bytes))
    most = ceil(total / servers)
    return most, most / total

"""The one thing that is left free: what the job takes beside its exchange, on this machine.

A step's forward and backward, Python's way through it, the recording: nobody can tell them from
constants. So each row's first measurement in a plain setting says them, and they count everywhere else.

They are not simply the step less the formula's exchange. Behind slow links between real hosts most of
what is then left over is time on the wire that the formula did not foresee. That shrinks with the bytes on
the busiest link, and a constant does not: taken from one server, it is far too much with four. So what is
left beyond the computing that the workers measured themselves is divided as the exchange is. The share of
bytes on links stays with these: an error of the formula, which the score shows. The rest is the job's way
through the exchange, Python and wake-ups, which no link changes, and is overhead. Where links are
everything, overhead is the measured computing; where there are none, it is the step less the exchange.

Where one machine plays all hosts, its cores move the bytes of all links, and no number of servers makes
these fewer: with one server and 4 workers 39 ms were left over of 17 MB behind 200 Mbit/s, and 108 ms of
34 MB behind 1 Gbit/s, two to three a megabyte though the wire was five times faster. There all that is
left is overhead.
"""

from __future__ import annotations

from msgspec import Struct


class Overhead(Struct, frozen=True):
    """Seconds a step and worker, as they change with the number of workers.

    Attributes:
        fixed: Of every worker, whatever its share of the batch.
        batch: Of the whole batch, of which each of n has an n-th.
        cores: Which all share; 0: each host has its own.
    """

    fixed: float
    batch: float = 0.0
    cores: int = 0

    def of(self, workers: int) -> float:
        """What a step takes beside its exchange."""
        return self._crowd(workers) * (self.fixed + self.batch / workers)

    def _crowd(self, workers: int) -> float:
        return max(1.0, workers / self.cores) if self.cores else 1.0

    @staticmethod
    def rest(step: float, predicted: float, computing: float | None, links: float) -> float:
        """What of one measured step is overhead, in seconds.

        Args:
            step: As it was measured.
            predicted: As the model has it with no overhead but `computing`.
            computing: That the workers measured; None: they do not tell it from the exchange, as in
                some of other people's rows, and all that is left counts.
            links: Part of the predicted exchange that is bytes on links, 0 to 1.
        """
        if computing is None:
            return step - predicted
        return computing + (1 - links) * (step - predicted)

    @staticmethod
    def solve(rest: float, workers: int, cores: int, alone: float | None) -> Overhead:
        """From what was left of one row's step.

        Args:
            rest: Its seconds without the exchange.
            workers: How many it had.
            cores: As the attribute.
            alone: The same of one process with the whole batch; None: not known, and nothing of `rest` is
                then taken to shrink with the share.
        """
        each = max(0.0, rest) / Overhead(0.0, 0.0, cores)._crowd(workers)
        if alone is None or workers == 1:
            return Overhead(each, 0.0, cores)
        # alone = fixed + batch, each = fixed + batch / workers
        batch = min(max(0.0, (alone - each) / (1 - 1 / workers)), each * workers)
        return Overhead(each - batch / workers, batch, cores)

"""The only fitted parameter: the time of a job besides its exchange, on this machine.

Constants do not determine a step's forward and backward, Python's overhead and recording. So each row's first
measurement in a plain setting determines them, and they apply in all other settings.

They are not simply the step minus the formula's exchange. Behind slow links between real hosts, most of the
remainder is time on the wire that the formula did not predict. That time shrinks with the bytes on the
busiest link, and a constant does not: fitted with one server, it is far too large with four. So what remains
beyond the compute that the workers measured is divided like the exchange. The share of bytes on links is an
error of the formula, which the score shows. The rest is the job's overhead in the exchange, Python and
wake-ups, which does not depend on links. If only links matter, overhead is the measured compute; without
links it is the step minus the exchange.

If one machine emulates all hosts, its cores move the bytes of all links, whatever the number of servers: with
one server and 4 workers, 39 ms remained for 17 MB behind 200 Mbit/s and 108 ms for 34 MB behind 1 Gbit/s,
two to three ms per MB although the wire was five times faster. There all of the remainder is overhead.
"""

from __future__ import annotations

from msgspec import Struct


class Overhead(Struct, frozen=True):
    """Seconds a step and worker, by number of workers.

    Attributes:
        fixed: Of every worker, whatever its share of the batch.
        batch: Of the whole batch; each of n workers has 1/n of it.
        cores: Number of shared cores; 0: each host has its own.
    """

    fixed: float
    batch: float = 0.0
    cores: int = 0

    def of(self, workers: int) -> float:
        """Returns the seconds of a step besides its exchange."""
        return self._crowd(workers) * (self.fixed + self.batch / workers)

    def _crowd(self, workers: int) -> float:
        return max(1.0, workers / self.cores) if self.cores else 1.0

    @staticmethod
    def rest(step: float, predicted: float, computing: float | None, links: float) -> float:
        """Returns the overhead of one measured step in seconds.

        Args:
            step: The measured step.
            predicted: The predicted step with `computing` as its only overhead.
            computing: Compute that the workers measured; None: not separable from the exchange, as for some
                peers, so all of the remainder counts.
            links: Share of the predicted exchange that is bytes on links, 0 to 1.
        """
        if computing is None:
            return step - predicted
        return computing + (1 - links) * (step - predicted)

    @staticmethod
    def solve(rest: float, workers: int, cores: int, alone: float | None) -> Overhead:
        """Returns the overhead from the remainder of one row's step.

        Args:
            rest: Seconds of the step without the exchange.
            workers: Number of workers.
            cores: As the attribute.
            alone: The remainder of one process with the whole batch; None: unknown, so no part of `rest`
                shrinks with the share.
        """
        each = max(0.0, rest) / Overhead(0.0, 0.0, cores)._crowd(workers)
        if alone is None or workers == 1:
            return Overhead(each, 0.0, cores)
        # alone = fixed + batch, each = fixed + batch / workers
        batch = min(max(0.0, (alone - each) / (1 - 1 / workers)), each * workers)
        return Overhead(each - batch / workers, batch, cores)

"""Finds out by trying how many bytes to hand over together.

Law: every size gets the same number of turns, taken in rotation so that a slow
spell of the machine hits all alike; the first step of a turn does not count.
What counts is how long a whole step takes: an exchange that hides behind
backward may cost more by the cores that it takes from it than it saves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from hubring.ps.core.messages import Call, Collective, ReduceOp
from hubring.ps.core.timing import fastest
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.exchange import Exchange

log = logging.getLogger(__name__)

TURNS = 3
STEPS = 4
"""Steps of a turn: the first to change over, the rest to count."""

SIZES = (25 << 20, 4 << 20, 10 << 20, 64 << 20)
"""Bytes to try. 25 MiB, DDP's, comes first: a job too short to choose stays near it."""


class Tuning:
    """Which size to use in each step of the trial, and which one won. It looks at no clock.

    Args:
        sizes: To try, the default first; at least two.
        agree: Makes one list of seconds of all ranks' lists, where ranks must use the same size.
    """

    def __init__(self, sizes: Sequence[int], agree: Callable[[list[float]], list[float]]) -> None:
        self._sizes = tuple(sizes)
        self._agree = agree
        self._steps = 0
        self._seconds: dict[int, list[float]] = {size: [] for size in sizes}
        self.chosen: int | None = None
        self.medians: dict[int, float] = {}
        """Seconds a step of each size, once one is chosen."""

    @property
    def size(self) -> int:
        """What the step under way uses."""
        return self.chosen or self._sizes[self._steps // STEPS % len(self._sizes)]

    def note(self, seconds: float) -> bool:
        """A step has ended; tells whether the next one uses another size."""
        used = self.size
        if self._steps % STEPS:
            self._seconds[used].append(seconds)
        self._steps += 1
        if self._steps == TURNS * STEPS * len(self._sizes):
            self._choose()
        return self.size != used

    def _choose(self) -> None:
        own = [median(self._seconds[size]) for size in self._sizes]
        self.medians = dict(zip(self._sizes, self._agree(own), strict=True))
        self.chosen = fastest(self.medians)

    def __str__(self) -> str:
        tried = ", ".join(f"{_mib(size)} {1e3 * each:.2f} ms" for size, each in sorted(self.medians.items()))
        return f"{_mib(self.size)} of gradients are handed over together; a step takes: {tried}"


class Tuner:
    """Tries sizes on an exchange, between its steps, and says what it chose.

    On a hub each rank chooses for itself: what is handed over when is its own affair, and changes no
    bit of the result. On a ring all choose what suits the slowest; there the size decides in which
    order three or more ranks' numbers are summed, so the last bits may differ.
    """

    def __init__(self, communicator: Communicator, exchange: Exchange, timeout: float | None) -> None:
        self._communicator = communicator
        self._exchange = exchange
        self._timeout = timeout
        self._ended: float | None = None
        sizes = exchange.sizes(SIZES) if communicator.tunable else []
        self._tuning = Tuning(sizes, self._agree) if len(sizes) > 1 else None
        if sizes:
            exchange.group(sizes[0])

    def note_step(self) -> None:
        """A step has ended, and the next has not begun. Raises as `Exchange.finish` does."""
        if self._tuning is None:
            return
        began, self._ended = self._ended, self._now()
        if began is not None and self._tuning.note(self._ended - began):
            self._exchange.group(self._tuning.size)
        if self._tuning.chosen is not None:
            log.log(logging.DEBUG if self._communicator.rank else logging.INFO, "%s", self._tuning)
            self._tuning = None

    def note_skip(self) -> None:
        """What was computed led to no step: its time is not the next step's."""
        self._ended = None

    def _now(self) -> float:
        """The time when devices have done what was queued so far; launching it takes hardly any."""
        for device in self._exchange.devices:
            torch.cuda.synchronize(device)
        return time.monotonic()

    def _agree(self, seconds: list[float]) -> list[float]:
        if not self._communicator.joins:
            return seconds
        own = torch.tensor(seconds, dtype=torch.float64)
        call = Call(Collective.ALLREDUCE, "tuning", ReduceOp.MAX)
        return [float(each) for each in self._communicator.collective(call, own).get(self._timeout)]


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MiB"

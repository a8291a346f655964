"""Measures how many bytes to send together.

Every size gets the same number of turns, in rotation, so that a slow phase of the machine
affects all sizes alike. The first step of a turn does not count. The measure is the time of
a whole step: an exchange that overlaps with backward can cost more, by the cores that it
takes, than it saves.
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
from hubring.workers.reducer.exchange import Exchange, bucket_groups

log = logging.getLogger(__name__)

TURNS = 3
STEPS = 4
"""Steps of a turn. The first is not timed."""

SIZES = (25 << 20, 4 << 20, 10 << 20, 64 << 20)
"""Sizes to try, in bytes. 25 MiB, the default of DDP, is first: a short job mostly uses the first size."""


class Tuning:
    """Chooses the size of each step of the trial, and the final size. It reads no clock.

    Args:
        sizes: At least two sizes to try, the default first.
        agree: Combines all ranks' lists of seconds if ranks must use the same size.
    """

    def __init__(self, sizes: Sequence[int], agree: Callable[[list[float]], list[float]]) -> None:
        self._sizes = tuple(sizes)
        self._agree = agree
        self._steps = 0
        self._seconds: dict[int, list[float]] = {size: [] for size in sizes}
        self.chosen: int | None = None
        self.medians: dict[int, float] = {}
        """Seconds per step of each size, once a size is chosen."""

    @property
    def size(self) -> int:
        """Size for the current step."""
        return self.chosen or self._sizes[self._steps // STEPS % len(self._sizes)]

    def note(self, seconds: float) -> bool:
        """Records a step; returns whether the next step uses another size."""
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
        return f"gradients are sent in groups of {_mib(self.size)}; time per step: {tried}"


class Tuner:
    """Tries sizes on an exchange between its steps and logs its choice.

    On a hub each rank chooses on its own: the size does not change the result. On a ring all ranks
    choose the size that is best for the slowest rank. There the size sets the order in which the
    values of three or more ranks are summed, so the last bits may differ.
    """

    def __init__(self, communicator: Communicator, exchange: Exchange, timeout: float | None) -> None:
        self._communicator = communicator
        self._exchange = exchange
        self._timeout = timeout
        self._ended: float | None = None
        sizes = sizes_of(exchange) if communicator.tunable else []
        self._tuning = Tuning(sizes, self._agree) if len(sizes) > 1 else None
        if sizes:
            exchange.group(sizes[0])

    def note_step(self) -> bool:
        """Records the end of a step, before the next one begins. Raises as `Exchange.finish`.

        Returns:
            Whether there is more to try.
        """
        if self._tuning is None:
            return False
        began, self._ended = self._ended, self._now()
        if began is not None and self._tuning.note(self._ended - began):
            self._exchange.group(self._tuning.size)
        if self._tuning.chosen is not None:
            # As text: a handler that keeps its records would keep the model.
            log.log(logging.DEBUG if self._communicator.rank else logging.INFO, "%s", str(self._tuning))
            self._tuning = None
        return self._tuning is not None

    def note_skip(self) -> None:
        """Records that a step was skipped, so that its time does not count for the next step."""
        self._ended = None

    def _now(self) -> float:
        """Returns the time once devices have finished their queues; the time to launch kernels is small."""
        for device in devices_of(self._exchange):
            torch.cuda.synchronize(device)
        return time.monotonic()

    def _agree(self, seconds: list[float]) -> list[float]:
        if not self._communicator.joins:
            return seconds
        own = torch.tensor(seconds, dtype=torch.float64, device="cpu")
        call = Call(Collective.ALLREDUCE, "tuning", ReduceOp.MAX)
        return [float(each) for each in self._communicator.collective(call, own).get(self._timeout)]


def devices_of(exchange: Exchange) -> set[torch.device]:
    """Returns the CUDA devices that hold gradients."""
    return {bucket.gradients.device for bucket in exchange.buckets if bucket.gradients.is_cuda}


def sizes_of(exchange: Exchange) -> list[int]:
    """Returns the sizes that give different groups; of sizes that give the same groups, the first."""
    cuts: dict[tuple[int, ...], int] = {}
    for nbytes in SIZES:
        parts = [bucket_groups(part, nbytes, joined=False) for part in exchange.parts.values()]
        cuts.setdefault(tuple(len(group.buckets) for part in parts for group in part), nbytes)
    return list(cuts.values())


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MiB"

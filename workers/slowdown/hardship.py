"""What a worker endures in an experiment: it sleeps where a slower one, or a given GPU, would compute.

Wherever the gradients go then, around a ring, to a hub or nowhere, it sleeps at the same places: in the
training thread, when backward has a gradient and before any bucket is handed over. So the sleep is part of
what is computed, not of what the exchange costs, and what is under way goes on meanwhile.

A straggler sleeps once a step, at the first gradient. An emulated device has its gradients one after another,
as a real one: backward takes two thirds of the step's computing, and of that each gradient as much as it has
of all elements. This machine sleeps until then; where it is later than the device would be, it does not. So
a step computes for as long as it is told, however few cores the workers share, as long as these can keep up.
What a step hands over and waits for in exchanges is no computing; where a peer's optimizer cannot tell, it
hides in the sleep. What passes between two steps is: an evaluation, say, leaves less to sleep. A parameter
that gets no gradient shortens the step by its share. A step of several backward passes or several optimizers
is one step, and so is one that is skipped and taken anew: of passes and of optimizers the first sleeps.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hubring.ps.core.errors import ConfigError, UsageError
from hubring.workers.slowdown.delays import Delays, Slowness

if TYPE_CHECKING:
    import torch

FORWARD = 1 / 3
"""Part of a step's computing that is over when backward begins: it takes about twice what forward takes."""


class Hardship:
    """Sleeps in every step.

    Args:
        delays: For how long.
        waited: Tells how many seconds training has waited for exchanges so far.
        clock: Instead of `time.monotonic`.
        sleep: Instead of `time.sleep`.

    Attributes:
        seconds: Slept so far.
    """

    def __init__(
        self,
        delays: Delays,
        waited: Callable[[], float],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.seconds = 0.0
        self._delays = delays
        self._waited = waited
        self._clock = clock
        self._sleep = sleep
        self._elements = 0
        self._step = -1
        self._began = 0.0
        self._there = 0
        self._lock = threading.Lock()  # backward runs one thread a device

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Sleeps from now on when backward has these parameters' gradients.

        To be called before others ask to be told of them, or they are told first.
        """
        alive = weakref.ref(self)  # torch keeps hooks where the garbage collector does not see them

        def accumulated(parameter: torch.Tensor) -> None:
            if (hardship := alive()) is not None:
                hardship._endure(parameter.numel())

        for parameter in parameters:
            self._elements += parameter.numel()
            parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]

    def begin(self, step: int) -> None:
        """A step begins, the one after so many."""
        self._step, self._there = step, 0
        self._began = self._computed()

    def _computed(self) -> float:
        return self._clock() - self._waited()

    def _endure(self, elements: int) -> None:
        with self._lock:
            if not self._there:
                extra = self._delays.lateness(self._step)
                self._began += extra
                self._rest(extra)
            self._there += elements
            if self._there <= self._elements:
                part = FORWARD + (1 - FORWARD) * self._there / self._elements
                self._rest(self._began + part * self._delays.compute - self._computed())

    def _rest(self, seconds: float) -> None:
        if seconds > 0:
            self._sleep(seconds)
            self.seconds += seconds


def read(path: Path) -> Slowness:
    """What a file for `--hardship` says.

    It holds a JSON object with `straggler` (null, or `kind`, `seconds`, `ranks`, `shape` as in
    `hubring.workers.slowdown.straggler.Straggler`), `compute` (null, or seconds) and `seed`.

    Raises:
        ConfigError: There is no such file, or it says something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Slowness)
    except OSError as cause:
        raise ConfigError(f"--hardship {path} cannot be read: {cause.strerror}") from cause
    except (msgspec.DecodeError, UsageError) as cause:
        raise ConfigError(
            f'--hardship {path}: {cause}; it holds an object such as {{"straggler": {{"kind": "constant",'
            ' "seconds": 0.1, "ranks": [1]}, "compute": 0.05, "seed": 0}'
        ) from cause

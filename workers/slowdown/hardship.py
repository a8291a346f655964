"""Slows a worker down in an experiment: it sleeps while a slower worker, or a given GPU, would compute.

The worker sleeps at the same places for every topology: in the training thread, when backward has a
gradient, and before any bucket is sent. So the sleep is part of computing, not of the exchange, and running
exchanges continue during the sleep.

A straggler sleeps once per step, at the first gradient. An emulated device has its gradients one after
another, like a real one: backward takes two thirds of the step's computing, divided among the gradients by
their elements. The worker sleeps until the emulated time of each gradient; if it is already later, it does
not sleep. So a step takes the given time even if the workers share few cores, as long as these are fast
enough.

Time that a step waits for exchanges is not computing. If a peer's optimizer cannot measure that time, it
counts as computing and shortens the sleep. Time between two steps, such as an evaluation, also shortens the
sleep. A parameter without a gradient shortens the step by its share. Several backward passes or several
optimizers in one step, and a step that is skipped and repeated, count as one step: only the first pass
sleeps.
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
"""Share of a step's computing before backward starts; backward takes about twice as long as forward."""


class Hardship:
    """Sleeps in every step.

    Args:
        delays: The delay of each step.
        waited: Returns the seconds that training has waited for exchanges so far.
        clock: Replaces `time.monotonic`.
        sleep: Replaces `time.sleep`.

    Attributes:
        seconds: Seconds slept so far.
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
        self._lock = threading.Lock()  # backward runs one thread per device

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Sleeps from now on when backward has a gradient of these parameters.

        Call this before other hooks are registered, so that the sleep runs first.
        """
        alive = weakref.ref(self)  # torch holds hooks where the garbage collector does not see them

        def accumulated(parameter: torch.Tensor) -> None:
            if (hardship := alive()) is not None:
                hardship._sleep_for(parameter.numel())

        for parameter in parameters:
            self._elements += parameter.numel()
            parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]

    def begin(self, step: int) -> None:
        """Starts a step; steps count from 0."""
        self._step, self._there = step, 0
        self._began = self._computed()

    def _computed(self) -> float:
        return self._clock() - self._waited()

    def _sleep_for(self, elements: int) -> None:
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
    """Reads a file for `--hardship`.

    The file holds a JSON object with `straggler` (null, or `kind`, `seconds`, `ranks`, `shape` as in
    `hubring.workers.slowdown.straggler.Straggler`), `compute` (null, or seconds) and `seed`.

    Raises:
        ConfigError: The file cannot be read, or does not hold such an object.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Slowness)
    except OSError as cause:
        raise ConfigError(f"--hardship {path} cannot be read: {cause.strerror}") from cause
    except (msgspec.DecodeError, UsageError) as cause:
        raise ConfigError(
            f'--hardship {path}: {cause}; expected an object such as {{"straggler": {{"kind": "constant",'
            ' "seconds": 0.1, "ranks": [1]}, "compute": 0.05, "seed": 0}'
        ) from cause

"""Slows a worker down in an experiment: it sleeps while a slower worker, or a given GPU, would compute.

The rule: a delay depends only on the seed, the rank and the step. So every row of a comparison has the
same delays in the same steps.

The worker sleeps at the same places for every topology: in the training thread, when backward has a
gradient, and before any bucket is sent. So the sleep is part of computing, not of the exchange, and
running exchanges continue during the sleep.

A straggler sleeps once per step, at the first gradient. An emulated device has its gradients one after
another, like a real one: backward takes two thirds of the step's computing, divided among the gradients
by their elements. The worker sleeps until the emulated time of each gradient; if it is already later, it
does not sleep. So a step takes the given time even if the workers share few cores, as long as these are
fast enough.

Time that a step waits for exchanges is not computing. If a peer's optimizer cannot measure that time, it
counts as computing and shortens the sleep. Time between two steps, such as an evaluation, also shortens
the sleep. A parameter without a gradient shortens the step by its share. Several backward passes or
several optimizers in one step, and a step that is skipped and repeated, count as one step: only the first
pass sleeps.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Literal, get_args

import msgspec
from msgspec import Struct

from hubring.ps.core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    import torch

StragglerKind = Literal["constant", "pareto", "host"]


class Straggler(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which ranks are slow, and how.

    Attributes:
        kind: `constant`: the same delay in every step; `pareto`: mostly short delays, and a few long ones;
            `host`: the ranks share one host and are slow in the same steps.
        seconds: Mean delay of a step.
        ranks: The slow ranks; empty: all.
        shape: Shape of the Pareto distribution, above 1; a smaller shape has a heavier tail.
    """

    kind: StragglerKind
    seconds: float
    ranks: tuple[int, ...] = ()
    shape: float = 2.5

    def __post_init__(self) -> None:
        if self.kind not in (kinds := get_args(StragglerKind)):
            raise UsageError(f"straggler: kind {self.kind!r}; expected one of {', '.join(kinds)}")
        if self.seconds < 0 or self.shape <= 1:
            raise UsageError(
                f"straggler: {self.seconds:g} s with shape {self.shape:g};"
                " expected at least 0 s, and a shape above 1, since otherwise there is no mean"
            )

    def __str__(self) -> str:
        who = "" if not self.ranks else "@" + ",".join(map(str, self.ranks))
        return f"{self.kind}{1e3 * self.seconds:g}ms{who}"


SLOW_SHARE = 0.1
"""Share of the steps in which a slow host is slow."""


class SlowdownSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of the file that `ps-worker --hardship` reads; the same for all workers of a run.

    Attributes:
        straggler: Which ranks are slow, and how; None: none.
        compute: Seconds of computing in a step on the emulated device, for example a GPU; None: no emulation.
        seed: Seed of the random delays.
    """

    straggler: Straggler | None = None
    compute: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.compute is not None and not self.compute >= 0:
            raise UsageError(f"compute: {self.compute:g} s per step; expected at least 0")

    def __str__(self) -> str:
        words = [] if self.straggler is None else [str(self.straggler)]
        words += [] if self.compute is None else [f"compute{1e3 * self.compute:g}ms"]
        return " ".join(words) or "none"

    def lateness(self, rank: int, step: int) -> float:
        """Returns the extra seconds of a rank's step; steps count from 0."""
        straggler = self.straggler
        if straggler is None or rank not in (straggler.ranks or (rank,)):
            return 0.0
        if straggler.kind == "constant":
            return straggler.seconds
        if straggler.kind == "host":
            slow = self._draw(step) < SLOW_SHARE
            return straggler.seconds / SLOW_SHARE if slow else 0.0
        # Lomax: a Pareto distribution that starts at 0. Its mean is scale / (shape - 1).
        scale = straggler.seconds * (straggler.shape - 1)
        return float(scale * ((1 - self._draw(step, rank)) ** (-1 / straggler.shape) - 1))

    def _draw(self, *words: int) -> float:
        """Returns a uniform number from [0, 1). A text seed gives the same number on every host."""
        return Random("/".join(map(str, (self.seed, *words)))).random()  # noqa: S311 - no secret


FORWARD_SHARE = 1 / 3
"""Share of a step's computing before backward starts; backward takes about twice as long as forward."""


class Slowdown:
    """Sleeps in every step.

    Args:
        slowness: The delays of all workers.
        rank: The worker's rank.
        waited: Returns the seconds that training has waited for exchanges so far.
        clock: Replaces `time.monotonic`.
        sleep: Replaces `time.sleep`.

    Attributes:
        seconds: Seconds slept so far.
        slowness: The delays.
    """

    def __init__(
        self,
        slowness: SlowdownSettings,
        rank: int,
        waited: Callable[[], float],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.seconds = 0.0
        self.slowness, self._rank = slowness, rank
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
                extra = self.slowness.lateness(self._rank, self._step)
                self._began += extra
                self._rest(extra)
            self._there += elements
            if self._there <= self._elements:
                part = FORWARD_SHARE + (1 - FORWARD_SHARE) * self._there / self._elements
                self._rest(self._began + part * (self.slowness.compute or 0.0) - self._computed())

    def _rest(self, seconds: float) -> None:
        if seconds > 0:
            self._sleep(seconds)
            self.seconds += seconds


def read_slowdown(path: Path) -> SlowdownSettings:
    """Reads a file for `--hardship`.

    The file holds a JSON object with `straggler` (null, or `kind`, `seconds`, `ranks`, `shape` as in
    `hubring.workers.runtime.slowdown.Straggler`), `compute` (null, or seconds) and `seed`.

    Raises:
        ConfigError: The file cannot be read, or does not hold such an object.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=SlowdownSettings)
    except OSError as cause:
        raise ConfigError(f"--hardship {path} cannot be read: {cause.strerror}") from cause
    except (msgspec.DecodeError, UsageError) as cause:
        raise ConfigError(
            f'--hardship {path}: {cause}; expected an object such as {{"straggler": {{"kind": "constant",'
            ' "seconds": 0.1, "ranks": [1]}, "compute": 0.05, "seed": 0}'
        ) from cause

"""What a worker is made to endure in an experiment: it sleeps as long as a slower one would compute.

Wherever the gradients go then, around a ring, to a hub or nowhere, it sleeps at the same place: in the
training thread, when backward has the step's first gradient and before any bucket is handed over. So the
sleep is part of what is computed, not of what the exchange costs, and what an earlier step left under way
goes on meanwhile. A step of several backward passes or several optimizers sleeps once, and so does one
that is skipped and taken anew.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ps.errors import ConfigError, UsageError
from workers.compare.hardship.delays import Delays, Slowness

if TYPE_CHECKING:
    import torch


class Trainer(Protocol):
    """Who counts the steps."""

    completed_steps: int


class Hardship:
    """Sleeps once a step.

    Args:
        delays: For how long.
        sleep: Instead of `time.sleep`.

    Attributes:
        seconds: Slept so far.
    """

    def __init__(self, delays: Delays, sleep: Callable[[float], None] = time.sleep) -> None:
        self.seconds = 0.0
        self._delays = delays
        self._sleep = sleep
        self._step = -1
        self._lock = threading.Lock()  # backward runs one thread a device

    def watch(self, parameters: Iterable[torch.Tensor], trainer: Trainer) -> None:
        """Sleeps from now on at the first gradient of every step that `trainer` takes.

        To be called before others ask to be told of these parameters' gradients, or they are told first.
        """
        alive = weakref.ref(trainer)  # torch keeps hooks where the garbage collector does not see them

        def accumulated(_: torch.Tensor) -> None:
            if (counting := alive()) is not None:
                self._endure(counting.completed_steps)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]

    def _endure(self, step: int) -> None:
        with self._lock:
            if step == self._step:
                return
            self._step = step
            seconds = self._delays.seconds(step)
            self._sleep(seconds)
            self.seconds += seconds


def read(path: Path) -> Slowness:
    """What a file for `--hardship` says.

    It holds a JSON object with `straggler` (null, or `kind`, `seconds`, `ranks`, `shape` as in
    `workers.compare.setting.Straggler`), `compute` (null, or seconds) and `seed`.

    Raises:
        ConfigError: There is no such file, or it says something else.
    """
    try:
        return Slowness.from_json(json.loads(path.read_text()))
    except OSError as cause:
        raise ConfigError(f"--hardship {path} cannot be read: {cause.strerror}") from cause
    except (ValueError, TypeError, UsageError) as cause:
        raise ConfigError(
            f'--hardship {path}: {cause}; it holds an object such as {{"straggler": {{"kind": "constant",'
            ' "seconds": 0.1, "ranks": [1]}, "compute": 0.05, "seed": 0}'
        ) from cause

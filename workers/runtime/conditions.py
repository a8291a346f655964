"""The conditions of a worker's steps, which a comparison needs to be the same in every row.

Flags are read at the end of steps 1, 2, 4, 8 and so on, and of every `EVERY`th, because a script can change
them at any time. One that is changed back within a step is not seen, except autocast, which the audit
watches. The script's own sleeps are timed where it calls `time.sleep`.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from functools import wraps
from operator import attrgetter
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from hubring.workers.runtime.slowdown import Slowdown, SlowdownSettings

if TYPE_CHECKING:
    from hubring.workers.audit.audit import Audit

_BACKENDS = (
    *(
        "cuda.matmul.fp32_precision",
        "cuda.matmul.allow_tf32",
        "cudnn.conv.fp32_precision",
        "cudnn.allow_tf32",
    ),
    *("mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision", "mkldnn.enabled"),
    *("cuda.matmul.allow_fp16_reduced_precision_reduction", "cudnn.benchmark", "cudnn.deterministic"),
)
"""Flags in `torch.backends` that change speed or rounding."""

EVERY = 32
"""Steps between two readings, which take about as long as the gate's record of a step."""

EXCHANGE, DELAYS = "exchange", "injected delays"
"""Conditions that depend on the row: only Hubring's rows have such an exchange, and a single process computes
for all."""

Value = str | float


class ConditionWatch:
    """Watches this process. Create it before the script runs, which may import `sleep` by its name."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, ...], None] = {}
        self._steps = 0
        self._asleep: Counter[int] = Counter()
        """Nanoseconds that each thread has slept in the script's code."""
        self._counts: list[tuple[int, int]] = []
        """Evaluations and the training thread's sleep, after the first step and after the last."""
        self._sleep = sleep = time.sleep

        @wraps(sleep)  # pickle finds it by its name, for a process that sleeps
        def noting(seconds: Any, /) -> None:
            sleep(seconds)
            self._slept(seconds, sys._getframe().f_back)

        time.sleep = noting

    def close(self) -> None:
        """Watches no longer."""
        time.sleep = self._sleep

    def step_completed(self, evaluations: int) -> None:
        """Reads the conditions in the thread that trains; takes the evaluations so far."""
        self._steps += 1
        self._counts[1:] = [(evaluations, self._asleep[get_ident()])]
        if self._steps % EVERY == 0 or self._steps.bit_count() == 1:
            self._seen[tuple(_read().values())] = None

    def report(self, hardship: Slowdown | None, audit: Audit | None, *, ahead: bool) -> dict[str, Value]:
        """Returns the conditions by name, several values of one with commas; empty before the first step.

        Args:
            hardship: The injected delays, if any.
            audit: Knows whether the script uses autocast.
            ahead: Whether `step()` does not wait for the exchange.
        """
        if not self._steps:
            return {}
        values = zip(*self._seen, strict=True)
        known = {name: ", ".join(dict.fromkeys(each)) for name, each in zip(_read(), values, strict=True)}
        ends = zip(self._counts[0], self._counts[-1], strict=True)
        evaluations, asleep = ((last - first) / max(1, self._steps - 1) for first, last in ends)
        return {
            **known,
            "evaluations per step": round(evaluations, 3),
            "ms in time.sleep() per step": round(asleep / 1e6, 3),
            DELAYS: str(SlowdownSettings() if hardship is None else hardship.slowness),
            "autocast": str(audit is not None and audit.autocast),
            EXCHANGE: "may end in the next step" if ahead else "ends in its step",
        }

    def _slept(self, seconds: Any, frame: FrameType | None) -> None:
        caller = "" if frame is None else str(frame.f_globals.get("__name__"))
        if not caller.startswith(("hubring.", "torch.")) or caller.startswith("hubring.workers.examples."):
            self._asleep[get_ident()] += round(1e9 * seconds)


def _read() -> dict[str, str]:
    return {
        "threads": str(torch.get_num_threads()),
        "cores": str(len(os.sched_getaffinity(0))),
        "niceness": str(os.getpriority(os.PRIO_PROCESS, 0)),
        "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        **{f"torch.backends.{name}": _flag(name) for name in _BACKENDS},
    }


def _flag(name: str) -> str:
    try:
        return str(attrgetter(name)(torch.backends))
    except (AttributeError, RuntimeError):  # another release, or a mix of the old and the new flags for TF32
        return "unknown"

"""Loss of a process: it is killed from outside without warning, as when a host dies.

Law: a worker's record shows how many steps it has completed. When it reaches the fault's step, the victim
gets SIGKILL. The worker can complete more steps between its report and the signal, so `Loss.step` holds the
last reported step rather than the fault's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hubring.workers.compare.experiment.setting import Fault

LOOK_SECONDS = 0.002
"""Interval of reading the record: a step of the smallest job."""


class Loss:
    """Watches a worker's record during the `with` block and kills the victim at its step.

    Args:
        fault: When to kill it.
        record: The file that the worker writes.
        find: Returns the victim's process, once training has begun. It may take longer than many steps.

    Attributes:
        step: Last reported step when it was killed; None: it ended before its step, so nothing was lost.
    """

    def __init__(self, fault: Fault, record: Path, find: Callable[[], int]) -> None:
        self.step: int | None = None
        self._fault = fault
        self._record = record
        self._find = find
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loss", daemon=True)

    def __enter__(self) -> Loss:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._record.exists():
            if self._over.wait(LOOK_SECONDS):
                return
        with self._record.open() as lines:
            begun, victim = "", None
            while not self._over.wait(LOOK_SECONDS):
                *whole, begun = (begun + lines.read()).split("\n")
                if not whole:
                    continue
                victim = victim or self._find()
                if (step := json.loads(whole[-1])["step"]) >= self._fault.step:
                    self._kill(victim, step)
                    return

    def _kill(self, victim: int, step: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, so nothing was lost
            os.kill(victim, signal.SIGKILL)
            self.step = step


def outlived(
    codes: Sequence[int], results: Sequence[Mapping[str, Any] | None], lost: int | None
) -> str | None:
    """Returns what a run lost besides the killed process.

    Args:
        codes: Every worker's exit code, by rank; negative for a signal.
        results: Every worker's last line, by rank; None where it printed none.
        lost: Rank of the killed worker; None if another process was killed.

    Returns:
        None if all other workers finished; else what failed, for a table.
    """
    failed = [rank for rank, code in enumerate(codes) if code and rank != lost]
    if not failed:
        return None
    ended = [results[rank] or {} for rank in failed]
    if any(each.get("topology") == "ring" for each in ended):
        return "the ring broke"
    return f"also failed: {', '.join(f'worker {rank}' for rank in failed)}"

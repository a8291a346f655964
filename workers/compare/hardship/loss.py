"""The loss of a worker: it is killed from outside, without a word, as a host dies.

The law: the worker's own record says how many steps it has completed, and once these are as many as the
fault says, it gets SIGKILL. Between its report and the signal it may get some steps further; how far it had
come is kept, so that nobody takes the fault's step for the one at which it died.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hubring.workers.compare.experiment.setting import Fault

LOOK_SECONDS = 0.002
"""From one look at the record to the next: a step of the smallest job."""


class Loss:
    """Watches a worker's record while the `with` block lasts, and kills the worker at its step.

    Args:
        fault: When.
        record: The file that the worker writes.
        pid: The worker's process, a child of this one that nobody has waited for yet.

    Attributes:
        step: The step that it had completed when it was killed, or None: it never came so far, and
            what the run shows is not the loss of a worker.
    """

    def __init__(self, fault: Fault, record: Path, pid: int) -> None:
        self.step: int | None = None
        self._fault = fault
        self._record = record
        self._process = os.pidfd_open(pid)  # stays its own, though the number may come to name another
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
        os.close(self._process)

    def _watch(self) -> None:
        while not self._record.exists():
            if self._over.wait(LOOK_SECONDS):
                return
        with self._record.open() as lines:
            begun = ""
            while not self._over.wait(LOOK_SECONDS):
                *whole, begun = (begun + lines.read()).split("\n")
                if whole and (step := json.loads(whole[-1])["step"]) >= self._fault.step:
                    self._kill(step)
                    return

    def _kill(self, step: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has come to its end, so nobody was lost
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
            self.step = step


def outlived(codes: Sequence[int], results: Sequence[Mapping[str, Any] | None], lost: int) -> str | None:
    """How a run went on without its lost worker.

    Args:
        codes: Every worker's exit code, by rank; negative for a signal.
        results: Every worker's last line, by rank; None where it printed none.
        lost: The rank that was killed.

    Returns:
        None where all others trained to the end; else what they lost, for a table.
    """
    failed = [rank for rank, code in enumerate(codes) if code and rank != lost]
    if not failed:
        return None
    ended = [results[rank] or {} for rank in failed]
    if any(each.get("topology") == "ring" for each in ended):
        return "lost its ring"
    return f"lost with it: {', '.join(f'worker {rank}' for rank in failed)}"

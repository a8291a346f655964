"""The audit of one worker: a file, and a tap on each optimizer."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from hubring.workers.audit.audit_file import AuditFile, ModelLayout, Step
from hubring.workers.audit.autocast import AutocastWatch
from hubring.workers.audit.step_tap import StepTap, Tapped
from hubring.workers.communicators.base import Communicator

AUTOCAST = "autocast"
"""The fact that a script uses autocast."""


class Audit:
    """Records the steps of all optimizers of one worker.

    Args:
        path: The file, which is replaced.
        communicator: Connects the ranks.
    """

    def __init__(self, path: Path, communicator: Communicator) -> None:
        self._file = AuditFile(path)
        self._communicator = communicator
        self._autocast = AutocastWatch()
        self._taps: list[StepTap] = []
        self._last: ModelLayout | None = None

    @property
    def seconds(self) -> float:
        """What recording has cost so far."""
        return sum(tap.seconds for tap in self._taps)

    def adopt(self, trainer: object) -> None:
        """Records the steps of an optimizer from now on. Those of `hubring.horovod` cannot be recorded."""
        if isinstance(trainer, Tapped):
            self._taps.append(StepTap(len(self._taps), trainer, self._communicator, self._write))

    def step_completed(self) -> None:
        """Records the step of the optimizer that has just completed one."""
        for tap in self._taps:
            if tap.trainer.completed_steps != tap.steps:
                tap.step_completed()

    def close(self) -> None:
        """Ends the recording."""
        for tap in self._taps:
            tap.close()
        self._autocast.close()
        if self._autocast.seen and self._last is not None:
            self._file.write(replace(self._last, facts=[*self._last.facts, AUTOCAST]))
        self._file.close()

    def _write(self, entry: ModelLayout | Step) -> None:
        if isinstance(entry, ModelLayout):
            self._last = entry
        self._file.write(entry)

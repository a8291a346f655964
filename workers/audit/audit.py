"""The audit of one worker: a file, a tap on each optimizer, and whether the script uses autocast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace
from torch.amp.autocast_mode import autocast

from hubring.workers.audit.audit_file import AuditFile, AuditStep, ModelLayout
from hubring.workers.audit.step_tap import StepTap, Tapped
from hubring.workers.communicators.base import Communicator


class AutocastWatch:
    """Notes from now on whether this process enters autocast.

    Autocast rounds each rank's part of a batch by itself, so a single process with the whole batch gets other
    gradients by right. torch has no hook for it, so this wraps the method that enters it.

    Attributes:
        seen: Whether it was entered.
    """

    def __init__(self) -> None:
        self.seen = False
        enter: Any = autocast.__enter__
        self._enter = enter

        def noting(context: autocast) -> Any:
            self.seen = self.seen or bool(getattr(context, "_enabled", True))
            return enter(context)

        autocast.__enter__ = noting  # type: ignore[method-assign]

    def close(self) -> None:
        """Watches no longer."""
        autocast.__enter__ = self._enter  # type: ignore[method-assign]


AUTOCAST = "autocast"
"""The fact that a script uses autocast."""


class Audit:
    """Records the steps of all optimizers of one worker.

    Args:
        path: The file, which is replaced.
        communicator: Connects the ranks.

    Attributes:
        samples: Samples of the last step; -1: not recorded.
    """

    def __init__(self, path: Path, communicator: Communicator) -> None:
        self.samples = -1
        self._file = AuditFile(path)
        self._communicator = communicator
        self._autocast = AutocastWatch()
        self._taps: list[StepTap] = []
        self._last: ModelLayout | None = None

    @property
    def seconds(self) -> float:
        """What recording has cost so far."""
        samples = [tap.samples.seconds for tap in self._taps if tap.samples is not None]
        return sum([*samples, *(tap.seconds for tap in self._taps)])

    @property
    def evaluations(self) -> int:
        """How often the script has evaluated its models so far."""
        return sum(tap.samples.evaluations for tap in self._taps if tap.samples is not None)

    @property
    def autocast(self) -> bool:
        """Whether the script has used autocast so far."""
        return self._autocast.seen

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

    def _write(self, entry: ModelLayout | AuditStep) -> None:
        if isinstance(entry, ModelLayout):
            self._last = entry
        elif entry.trainer >= 0:
            self.samples = entry.samples
        self._file.write(entry)

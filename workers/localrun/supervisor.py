"""Starts a job again from its newest checkpoint after it lost a process.

Law: only a loss restarts a job (`ps/process/restarts.py`), and never a request to stop. A checkpoint
of a later step is progress: it allows all restarts again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any, NamedTuple

from hubring.ps.checkpoint.checkpoint_folder import newest_step
from hubring.ps.core.errors import ServerUnreachable
from hubring.ps.process.children import passing_on
from hubring.ps.process.restarts import Restarts, helps, wait
from hubring.workers.localrun.report import Report


class Ending(NamedTuple):
    """How one attempt at a job ended.

    Attributes:
        code: The exit code.
        cause: What ended it, as a clause; empty after success.
        asked: Whether it was asked to stop.
        results: Rank to the worker's result; workers without a result are missing.
    """

    code: int
    cause: str = ""
    asked: bool = False
    results: Mapping[int, Mapping[str, Any]] = {}


class Supervisor:
    """Runs a job until it ends in a way that a restart does not help.

    Args:
        most: How many restarts are allowed without a newer checkpoint.
        folder: The folder of the job's checkpoints, or None.
        report: Prints each restart.
    """

    def __init__(self, most: int, folder: Path | None, report: Report) -> None:
        self._restarts = Restarts(most)
        self._folder = folder
        self._report = report
        self._step = self._newest_step()

    @property
    def restarts(self) -> int:
        """How often the job was restarted."""
        return self._restarts.total

    def restarts_after(self, code: int) -> bool:
        """Returns whether a job that ends now with this exit code starts again."""
        if (step := self._newest_step()) > self._step:
            self._step = step
            self._restarts.note_progress()
        return helps(code) and self._restarts.left > 0

    def run(self, attempt: Callable[[], Ending]) -> Ending:
        """Runs the job, again after each loss.

        Args:
            attempt: Starts the job, and returns how it ended. Nothing of it runs afterwards.

        Raises:
            ServerUnreachable: The server did not start, and no restart is left.
        """
        while True:
            try:
                ending = attempt()
            except ServerUnreachable as error:
                if not self.restarts_after(error.exit_code):
                    raise
                ending = Ending(error.exit_code, str(error))
            if ending.asked or not self.restarts_after(ending.code):
                if helps(ending.code) and not ending.asked:
                    self._report.final(self.restarts, saves=self._folder is not None)
                return ending
            pause = self._restarts.next_pause()
            self._report.restart(ending.cause, pause, self._restarts.left, self._start())
            signals: list[int] = []
            with passing_on((SIGINT, SIGTERM), signals.append):
                stopped = wait(pause, signals)
            if stopped:
                return Ending(stopped, asked=True)

    def _newest_step(self) -> int:
        step = newest_step(self._folder) if self._folder is not None else None
        return -1 if step is None else step

    def _start(self) -> str:
        """Returns where the next attempt starts, in words."""
        if self._step >= 0:
            return f"from the checkpoint of step {self._step}"
        why = "no --checkpoint-dir is set" if self._folder is None else "there is no checkpoint yet"
        return f"at step 0, because {why}"

"""What a job does after a failure: it continues, or starts again from its newest checkpoint. What it prints.

Law: only a loss restarts a job (`ps/process/restarts.py`), and never a request to stop. A checkpoint
of a later step is progress: it allows all restarts again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from signal import SIGINT
from typing import Any, NamedTuple

from hubring.ps.checkpoint.checkpoint_folder import OF_WORKERS, published, step_of, with_age
from hubring.ps.core.errors import HubringError, Preempted, ServerUnreachable
from hubring.ps.process.child import passing_on
from hubring.ps.process.launch import STOP_SIGNALS
from hubring.ps.process.restarts import Restarts, restart_helps, wait_to_restart
from hubring.workers.localrun.server import LocalServer
from hubring.workers.localrun.settings import LocalJobSettings

MOST_METRICS = 4
_STOPPED = {Preempted.exit_code: "stopped on request", 128 + SIGINT: "interrupted"}


class FailureResponse(StrEnum):
    """What happens to a job when a worker fails."""

    RESTART = "restarting it"
    WITHOUT = "continuing without it"
    END = "stopping the other workers"


@dataclass
class FailurePolicy:
    """How many failures a job survives; by default none.

    Attributes:
        least: Number of workers that training needs.
        restarts: Number of restarts that are left.
        pause: Seconds until the rank of a lost worker is free.
    """

    least: int
    restarts: int = 0
    pause: float = 0.0

    def verdict(self, running: int, finished: int) -> FailureResponse:
        """Decides what to do about one more failure.

        Args:
            running: Other workers that run. Without any, no worker has the state that a new worker needs.
            finished: Other workers that finished. After the first, no worker can join.
        """
        if self.restarts and running and not finished:
            self.restarts -= 1
            return FailureResponse.RESTART
        return FailureResponse.WITHOUT if running + finished >= self.least else FailureResponse.END


class JobReport:
    """Prints the lines of one job.

    Args:
        size: Number of workers.
        settings: The job's settings.
    """

    def __init__(self, size: int, settings: LocalJobSettings) -> None:
        self._size, self._settings = size, settings
        self._began = time.monotonic()

    def starting(self) -> None:
        """Prints what starts. Call it first: server and workers need seconds to import torch."""
        mode = self._settings.mode and f", {self._settings.mode}"
        how = "ring" if self._settings.topology == "ring" else f"hub{mode}"
        _print(f"starting 1 server, {_count(self._size, 'worker')} ({how})")

    def resuming(self, checkpoint: Path) -> None:
        """Prints from where the job continues."""
        _print(f"resuming at step {step_of(checkpoint)} from {with_age(checkpoint)}")

    def page(self, banner: str) -> None:
        """Prints the address of the status page, which the server's banner holds."""
        for line in banner.splitlines():
            name, _, address = line.strip().partition(" ")
            if name == "page":
                _print(f"status page: {address.strip()}")

    def server_end(self, server: LocalServer, code: int, results: Mapping[int, object], newest: int) -> int:
        """Prints how the server ended if that was not well, and what it lost; returns the job's exit code.

        A worker with a result has heard how its job ended, so 0 includes the last checkpoint.

        Args:
            server: The server, which has ended.
            code: What the workers ended with: they finished, or stopped on request.
            results: The workers' results.
            newest: The step of the newest checkpoint; -1 without one.
        """
        saved = f"the newest checkpoint is of step {newest}" if newest >= 0 else "there is no checkpoint"
        lost = not results and self._settings.checkpoints is not None and server.steps > max(newest, 0)
        if server.overdue:
            _print(f"the server did not end in time and was killed; {saved}")
        elif lost:
            _print(f"the workers ended without leaving the job, at step {server.steps}; {saved}")
        elif not code and server.process.exit_code() not in (0, Preempted.exit_code):
            _print(f"the server {server.process.ended}; {saved}")
            return server.process.exit_code()
        elif not (code or results or server.job or server.steps):
            hint = "on a hub, not in a ring, --as-gloo trains a script of torch.distributed"
            _print(f"Hubring took no part: the script never called hubring.init(); {hint}")
        return code or (HubringError.exit_code if lost or (server.overdue and not results) else 0)

    def end(
        self, code: int, results: Mapping[int, Mapping[str, Any]], restarts: int, before: int = 0
    ) -> None:
        """Prints the summary.

        Args:
            code: The job's exit code.
            results: Rank to the worker's result; workers that did not join are missing.
            restarts: How often the job was restarted.
            before: The step at which it began, which earlier runs had completed.
        """
        seconds = time.monotonic() - self._began
        steps = sorted({max(0, result["steps"] - before) for result in results.values()})
        done = f" {'-'.join(map(str, [*steps[:1], *steps[1:][-1:]]))} steps" if steps else ""
        done += f" (to step {before + steps[-1]})" if steps and before else ""
        took = f"{seconds:.1f} s" + (f" with {_count(restarts, 'restart')}" if restarts else "")
        if not code:
            _print(f"{_count(self._size, 'worker')} finished{done} in {took}{_metrics(results)}")
        elif code in _STOPPED:
            _print(f"{_STOPPED[code]} after{done or ' 0 steps'} and {took} (exit code {code})")
        else:
            _print(f"failed after {took} (exit code {code})")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _metrics(results: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns what the lowest rank reported last."""
    if not results:
        return ""
    rank = min(results)
    metrics = list(results[rank]["metrics"].items())[:MOST_METRICS]
    shown = ", ".join(
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics
    )
    return f"; rank {rank}: {shown}" if shown else ""


def _print(text: str) -> None:
    print(f"ps-run: {text}", file=sys.stderr, flush=True)


class AttemptEnd(NamedTuple):
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

    Attributes:
        began: The step of the newest checkpoint at the start; -1 without one.
    """

    def __init__(self, most: int, folder: Path | None) -> None:
        self._restarts = Restarts(most)
        self._folder = folder
        self.began = self._step = self.newest_step()

    @property
    def restarts(self) -> int:
        """How often the job was restarted."""
        return self._restarts.total

    def restarts_after(self, code: int) -> bool:
        """Returns whether a job that ends now with this exit code starts again."""
        if (step := self.newest_step()) > self._step:
            self._step = step
            self._restarts.note_progress()
        return restart_helps(code) and self._restarts.left > 0

    def run(self, attempt: Callable[[], AttemptEnd]) -> AttemptEnd:
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
                ending = AttemptEnd(error.exit_code, str(error))
            if ending.asked or not self.restarts_after(ending.code):
                if restart_helps(ending.code) and not ending.asked:
                    self._print_why_not()
                return ending
            pause = self._restarts.next_pause()
            left = _count(self._restarts.left, "restart")
            _print(f"{ending.cause}; restarting the job in {pause:g} s {self._start()} ({left} left)")
            signals: list[int] = []
            with passing_on(STOP_SIGNALS, signals.append):
                stopped = wait_to_restart(pause, signals)
            if stopped:
                return AttemptEnd(stopped, asked=True)

    def newest_step(self) -> int:
        """Returns the step of the job's newest checkpoint; -1 without one."""
        newest = self.newest()
        return -1 if newest is None else step_of(newest)

    def newest(self) -> Path | None:
        """Returns the job's newest checkpoint."""
        folders = [] if self._folder is None else [self._folder, self._folder / OF_WORKERS]
        return max((one for folder in folders for one in published(folder)[:1]), key=step_of, default=None)

    def _print_why_not(self) -> None:
        """Prints why a job that lost a process does not start again."""
        if self.restarts:
            _print(f"no restart is left after {self.restarts}; --restarts N sets their number")
        elif self._folder is None:
            _print("the job is lost; with --checkpoint-dir DIR it starts again from its last checkpoint")

    def _start(self) -> str:
        """Returns where the next attempt starts, in words."""
        if self._step >= 0:
            return f"from the checkpoint of step {self._step}"
        why = "no --checkpoint-dir is set" if self._folder is None else "there is no checkpoint yet"
        return f"at step 0, because {why}"

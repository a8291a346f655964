"""The workers of one job on this machine. They start together, and stop together when one fails."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from subprocess import PIPE

from hubring.ps.process.child import Child
from hubring.ps.process.children import Children, first_ended
from hubring.ps.process.output import Output

OUTPUTS = ("stdout", "stderr")
HEAR_SECONDS, LOOK_SECONDS = 5.0, 0.1
"""Seconds to wait for the rest of the output of ended workers: for all together, and at least for each."""


def folder_of(outputs: Path | str | None, rank: int, size: int) -> Path | None:
    """Creates and returns the folder for one worker's output; None without `outputs`."""
    if outputs is None:
        return None
    folder = Path(outputs) / f"rank.{rank:0{len(str(size - 1))}}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Worker(Child):
    """One worker process and its outputs.

    Args:
        rank: The worker's rank.
        command: Program and arguments.
        environment: All environment variables of the worker.
        folder: Folder for copies of the output; None: no copies.
    """

    def __init__(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str], folder: Path | None
    ) -> None:
        super().__init__(f"rank {rank}", command, environment, stdout=PIPE, stderr=PIPE)
        self.rank = rank
        pipes = (self.stdout, sys.stdout.buffer), (self.stderr, sys.stderr.buffer)
        self._outputs = [
            Output(source, target, f"[{rank}]<{name}>:", folder / name if folder is not None else None)
            for name, (source, target) in zip(OUTPUTS, pipes, strict=True)
        ]

    def hear_out(self, seconds: float) -> None:
        """Returns once all output is written, or after `seconds` for each stream."""
        for output in self._outputs:
            output.join(seconds)


class Verdict(StrEnum):
    """What happens to a job when a worker fails."""

    RESTART = "restarting it"
    WITHOUT = "continuing without it"
    END = "stopping the other workers"


@dataclass
class Patience:
    """How many failures a job survives; by default none.

    Attributes:
        least: Number of workers that training needs.
        restarts: Number of restarts that are left.
        pause: Seconds until the rank of a lost worker is free.
    """

    least: int
    restarts: int = 0
    pause: float = 0.0

    def verdict(self, running: int, finished: int) -> Verdict:
        """Decides what to do about one more failure.

        Args:
            running: Other workers that run. Without any, no worker has the state that a new worker needs.
            finished: Other workers that finished. After the first, no worker can join.
        """
        if self.restarts and running and not finished:
            self.restarts -= 1
            return Verdict.RESTART
        return Verdict.WITHOUT if running + finished >= self.least else Verdict.END


class Team:
    """Runs the workers of a job, and waits for all of them.

    Args:
        commands: One command for each rank.
        environments: All environment variables, for each rank.
        folder: Folder for copies of the output, as rank.N/stdout and rank.N/stderr; None: no copies.
        patience: How many failures the job survives; None: none.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        folder: Path | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._commands, self._environments, self._folder = commands, environments, folder
        self._patience = patience or Patience(least=len(commands))
        self._workers: Children[Worker] = Children()
        self._running: list[Worker] = []
        self._places: dict[int, float] = {}
        """Rank of each worker to restart, to the time at which the rank is free."""

    def signal(self, number: int) -> None:
        """Forwards a signal to all workers. After that, no worker is restarted."""
        self._patience = Patience(least=len(self._commands))
        self._workers.signal(number)

    def run(self, on_failure: Callable[[int, int, Verdict], None]) -> int:
        """Starts all workers and waits for them. Stops all if training cannot continue after a failure.

        Args:
            on_failure: Called with the rank, the exit code and the verdict of each failure.

        Returns:
            The exit code of the failure that ended the job; 0 without one.
        """
        try:
            return self._supervise(on_failure)
        finally:
            deadline = time.monotonic() + HEAR_SECONDS
            for worker in self._workers.started:
                worker.hear_out(max(LOOK_SECONDS, deadline - time.monotonic()))

    def _supervise(self, on_failure: Callable[[int, int, Verdict], None]) -> int:
        finished = 0
        with self._workers:
            for rank in range(len(self._commands)):
                self._start(rank)
            while self._running or self._places:
                worker = first_ended(self._running, self._until_free())
                if worker is None:
                    self._fill(finished)
                    continue
                self._running.remove(worker)
                finished += worker.code == 0
                if not worker.code:
                    continue
                verdict = self._patience.verdict(len(self._running), finished)
                on_failure(worker.rank, worker.exit_code(), verdict)
                if verdict is Verdict.END:
                    return worker.exit_code()
                if verdict is Verdict.RESTART:
                    self._places[worker.rank] = time.monotonic() + self._patience.pause
        return 0

    def _start(self, rank: int) -> None:
        folder = folder_of(self._folder, rank, len(self._commands))
        worker = Worker(rank, self._commands[rank], self._environments[rank], folder)
        self._running.append(self._workers.add(worker))

    def _until_free(self) -> float | None:
        return max(0.0, min(self._places.values()) - time.monotonic()) if self._places else None

    def _fill(self, finished: int) -> None:
        """Restarts the lost workers whose ranks are free."""
        for rank in [rank for rank, free in self._places.items() if free <= time.monotonic()]:
            del self._places[rank]
            if self._patience.pause and not finished:
                self._start(rank)

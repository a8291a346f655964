"""The workers of one job on this machine: started together, and ended together when one fails."""

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
"""How long the outputs of workers that have ended are waited for: of all together, and of each at least."""


def folder_of(outputs: Path | str | None, rank: int, size: int) -> Path | None:
    """Where one of `size` workers has copies of its outputs, made if need be; None: nowhere."""
    if outputs is None:
        return None
    folder = Path(outputs) / f"rank.{rank:0{len(str(size - 1))}}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Worker(Child):
    """One worker process and its outputs.

    Args:
        rank: Its rank.
        command: Program and arguments.
        environment: All of its variables.
        folder: Where copies of its outputs go; None: nowhere.
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
        """Returns once everything it said is out, or nothing came for so many seconds."""
        for output in self._outputs:
            output.join(seconds)


class Verdict(StrEnum):
    """What becomes of a job when a worker fails."""

    ANEW = "starting it anew"
    WITHOUT = "going on without it"
    END = "ending the others"


@dataclass
class Patience:
    """How many failures are borne; as it is made, none.

    Attributes:
        least: How many workers training needs.
        restarts: How many may still be started anew.
        pause: Seconds until the place of one that is lost is free.
    """

    least: int
    restarts: int = 0
    pause: float = 0.0

    def verdict(self, running: int, finished: int) -> Verdict:
        """What to do about one more failure.

        Args:
            running: Others that run; without any, nobody has what a new one needs.
            finished: Others that are done, after which nobody is let in.
        """
        if self.restarts and running and not finished:
            self.restarts -= 1
            return Verdict.ANEW
        return Verdict.WITHOUT if running + finished >= self.least else Verdict.END


class Team:
    """Some workers, waited for as one.

    Args:
        commands: One for each rank.
        environments: Likewise.
        folder: Where outputs are copied to, as rank.N/stdout and rank.N/stderr; None: nowhere.
        patience: How many failures are borne; None: none.
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
        """When the place of a rank that is to be started anew will be free."""

    def signal(self, number: int) -> None:
        """Passes a signal on to all; none is started anew after that."""
        self._patience = Patience(least=len(self._commands))
        self._workers.signal(number)

    def run(self, on_failure: Callable[[int, int, Verdict], None]) -> int:
        """Starts all and waits for them; when one fails whom training needs, the others are ended.

        Args:
            on_failure: Told rank and exit code of one that fails, and what is done about it.

        Returns:
            The exit code of the failure that ended the job; 0 if there was none.
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
                if verdict is Verdict.ANEW:
                    self._places[worker.rank] = time.monotonic() + self._patience.pause
        return 0

    def _start(self, rank: int) -> None:
        folder = folder_of(self._folder, rank, len(self._commands))
        worker = Worker(rank, self._commands[rank], self._environments[rank], folder)
        self._running.append(self._workers.add(worker))

    def _until_free(self) -> float | None:
        return max(0.0, min(self._places.values()) - time.monotonic()) if self._places else None

    def _fill(self, finished: int) -> None:
        """Starts workers anew whose places are free."""
        for rank in [rank for rank, free in self._places.items() if free <= time.monotonic()]:
            del self._places[rank]
            if self._patience.pause and not finished:
                self._start(rank)

"""The workers of one job on this machine: started together, and ended together when one fails."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from queue import SimpleQueue

from hubring.workers.localrun.stream import OUTPUTS, Stream, folder_of

GRACE_SECONDS = 15.0
"""How long workers get to end by themselves once another has failed."""


class Worker:
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
        self.rank = rank
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            process_group=0,  # a Ctrl-C in the terminal is ours to pass on, once
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        sources, targets = (
            (self._process.stdout, self._process.stderr),
            (sys.stdout.buffer, sys.stderr.buffer),
        )
        self._streams = [
            Stream(source, target, f"[{rank}]<{name}>:", folder / name if folder is not None else None)
            for name, source, target in zip(OUTPUTS, sources, targets, strict=True)
        ]

    def wait(self) -> int:
        """Its exit code, 128+n if signal n ended it, once it has ended and everything it said is out."""
        code = self._process.wait()
        for stream in self._streams:
            stream.join()
        return code if code >= 0 else 128 - code

    def signal(self, number: int) -> None:
        """Passes a signal on; one that has ended is not missed."""
        self._process.send_signal(number)


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
        self._events: SimpleQueue[tuple[int, int | None]] = SimpleQueue()
        """Ranks with the exit code of a worker that has ended, or None: the place is free."""
        self._running: dict[int, Worker] = {}
        self._awaited: set[int] = set()
        """Ranks whose places will be free."""
        try:
            for rank in range(len(commands)):
                self._start(rank)
        except BaseException:
            self._pass_on(signal.SIGKILL)
            raise

    def signal(self, number: int) -> None:
        """Passes a signal on to all; none is started anew after that."""
        self._patience = Patience(least=len(self._commands))
        self._pass_on(number)

    def wait(self, on_failure: Callable[[int, int, Verdict], None]) -> int:
        """Waits for all; when one fails whom training needs, the others are ended.

        Args:
            on_failure: Told rank and exit code of one that fails, and what is done about it.

        Returns:
            The exit code of the failure that ended the job; 0 if there was none.
        """
        first, finished = 0, 0
        killer = threading.Timer(GRACE_SECONDS, self._pass_on, (signal.SIGKILL,))
        while self._running or self._awaited:
            rank, code = self._events.get()
            if code is None:
                self._awaited.discard(rank)
                if not first and not finished and self._patience.pause:
                    self._start(rank)
                continue
            del self._running[rank]
            finished += code == 0
            if not code or first:
                continue
            verdict = self._patience.verdict(len(self._running), finished)
            on_failure(rank, code, verdict)
            if verdict is Verdict.ANEW:
                self._await_place(rank)
            elif verdict is Verdict.END:
                first = code
                self._pass_on(signal.SIGTERM)
                killer.start()
        killer.cancel()
        return first

    def _start(self, rank: int) -> None:
        folder = folder_of(self._folder, rank, len(self._commands))
        worker = Worker(rank, self._commands[rank], self._environments[rank], folder)
        self._running[rank] = worker
        threading.Thread(target=self._watch, args=(worker,), name=f"wait {rank}").start()

    def _await_place(self, rank: int) -> None:
        self._awaited.add(rank)
        timer = threading.Timer(self._patience.pause, self._events.put, ((rank, None),))
        timer.daemon = True
        timer.start()

    def _pass_on(self, number: int) -> None:
        for worker in list(self._running.values()):
            worker.signal(number)

    def _watch(self, worker: Worker) -> None:
        self._events.put((worker.rank, worker.wait()))

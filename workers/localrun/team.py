"""The workers of one job on this machine. They start together, and stop together when one fails.

Law: one end explains the others. A process that was killed explains all; a worker that exits with 69 reports
what happened to another one, whose exit code then counts.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from signal import SIGPIPE, SIGTERM
from subprocess import DEVNULL, PIPE
from threading import Lock
from typing import Any

from hubring.ps.core.errors import Preempted
from hubring.ps.process.child import Child
from hubring.ps.process.children import Children, first_ended
from hubring.ps.process.output import Output
from hubring.ps.process.restarts import LOST
from hubring.ps.process.screen import Screen, drop
from hubring.workers.localrun import stdin

OUTPUTS = ("stdout", "stderr")
WATCH_SECONDS = 0.2
"""How often the workers are looked after, if none ends."""
QUIT_SECONDS = 5.0
"""How long the workers have to end after a second signal."""
CAUSE_SECONDS = 5.0
"""How long a worker that explains the end of another one has to end."""
SERVERLESS_SECONDS = 20.0
"""How long the workers have to end after a server that failed. It has told them why."""
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
        screens: Where to show standard output and standard error.
        source: Its standard input, as `subprocess.Popen` takes it.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path | None,
        screens: Sequence[Screen],
        source: int | None,
    ) -> None:
        super().__init__(f"rank {rank}", command, environment, stdin=source, stdout=PIPE, stderr=PIPE)
        self.rank = rank
        pipes = zip(OUTPUTS, (self.stdout, self.stderr), screens, strict=True)
        self._outputs = [
            Output(
                pipe,
                screen,
                f"[{rank}]<{name}>:",
                folder / name if folder is not None else None,
                keeps_result=name == "stdout",
            )
            for name, pipe, screen in pipes
        ]

    def hear_out(self, seconds: float) -> dict[str, Any]:
        """Returns the worker's result once all output is written, or after `seconds` for each stream.

        The result is empty if the last line of the worker's output is not one.
        """
        shown, result = self._outputs[0], {}
        for output in self._outputs:
            output.join(seconds)
        last = shown.join(0.0)
        with contextlib.suppress(ValueError):
            result = json.loads(last)
        if last and "exit_code" not in result:  # a JSON line of the script
            shown.show(last)
            return {}
        return result


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
        server: The job's server. If it is lost, the workers stop.

    Attributes:
        results: Rank to the result that the worker printed last; workers without a result are missing.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        folder: Path | None = None,
        patience: Patience | None = None,
        server: Child | None = None,
    ) -> None:
        self.results: dict[int, dict[str, Any]] = {}
        self._commands, self._environments, self._folder = commands, environments, folder
        self._patience = patience or Patience(least=len(commands))
        self._workers: Children[Worker] = Children()
        self._running: list[Worker] = []
        self._server = server
        self._places: dict[int, float] = {}
        """Rank of each worker to restart, to the time at which the rank is free."""
        self._screens = _screens(self._lose_output)
        self._stdin = stdin.source()
        self._lost_output: OSError | None = None
        self._losing = Lock()
        self._asked = 0
        """How many signals the caller forwarded."""
        self._signals: list[int] = []
        """All signals that the workers got, in order."""
        self._quit_at = self._serverless_at = math.inf

    @property
    def asked(self) -> bool:
        """Whether the caller forwarded a signal, the output was lost, or all workers stopped on request.

        The request can come from the status page, or as a signal to a worker or to the server.
        """
        stopped = [result for result in self.results.values() if _stopped(result)]
        return bool(self._signals) or len(stopped) == len(self._commands)

    def say(self, text: str) -> None:
        """Writes a line to standard error, between the workers' lines."""
        self._screens[1].write(self, b"", text.encode() + b"\n")

    def signal(self, number: int) -> None:
        """Forwards a signal to all workers. After that, no worker is restarted.

        After the second signal, workers have `QUIT_SECONDS` to end.
        """
        self._asked += 1
        if self._asked == 2:
            self._quit_at = time.monotonic() + QUIT_SECONDS
        self._send(number)

    def kill(self) -> None:
        """Kills all workers at once, and what workers that have ended left behind."""
        for worker in self._workers.started:
            worker.kill()

    def run(self, on_failure: Callable[[Child, Verdict], None]) -> int:
        """Starts all workers and waits for them. Stops all if training cannot continue after a failure.

        Args:
            on_failure: Called with the worker or the server that failed, and what happens next.

        Returns:
            The exit code of the failure that ended the job; 0 without one.
        """
        try:
            code = self._supervise(on_failure)
        finally:
            deadline = time.monotonic() + HEAR_SECONDS
            for worker in self._workers.started:
                result = worker.hear_out(max(LOOK_SECONDS, deadline - time.monotonic()))
                if "rank" in result:
                    self.results[worker.rank] = result
        if self._lost_output is None:
            return code
        if isinstance(self._lost_output, BrokenPipeError):
            return 128 + SIGPIPE
        self.say(
            f"ps-run: the output cannot be written: {self._lost_output}; free some space, or redirect it"
        )
        return os.EX_IOERR

    def _supervise(self, on_failure: Callable[[Child, Verdict], None]) -> int:
        finished = failed = 0
        with self._workers:
            for rank in range(len(self._commands)):
                self._start(rank)
            while self._running or self._places:
                if time.monotonic() > self._quit_at:
                    return self._kill()
                if (server := self._lost_server()) is not None:
                    on_failure(server, Verdict.END)
                    return server.exit_code()
                worker = first_ended(self._running, WATCH_SECONDS)
                if worker is None:
                    self._fill(finished)
                    continue
                self._running.remove(worker)
                finished += worker.code == 0
                if not worker.code:
                    continue
                if self._signals:  # the others end as well, each after what it still has to save
                    failed = failed or worker.exit_code()
                    self._places.clear()
                    continue
                verdict = self._patience.verdict(len(self._running), finished)
                cause = self._cause(worker) if verdict is Verdict.END else worker
                on_failure(cause, verdict)
                if verdict is Verdict.END:
                    return cause.exit_code()
                if verdict is Verdict.RESTART:
                    self._places[worker.rank] = time.monotonic() + self._patience.pause
        return failed

    def _lost_server(self) -> Child | None:
        """Returns the server if the workers must stop because it failed.

        A server that was killed told the workers nothing. One that exited with an error did.
        """
        if self._server is None or self._signals or not self._server.code:
            return None
        if self._server.code > 0 and self._serverless_at == math.inf:
            self._serverless_at = time.monotonic() + SERVERLESS_SECONDS
        killed = self._server.code < 0
        return self._server if killed or time.monotonic() > self._serverless_at else None

    def _cause(self, first: Worker) -> Child:
        """Returns the process whose end explains that of this worker."""
        deadline, ended = time.monotonic() + CAUSE_SECONDS, [first]
        others = list(self._running)
        while others and first.code == LOST and time.monotonic() < deadline and not _killed(ended):
            other = first_ended(others, WATCH_SECONDS)
            if other is not None:
                others.remove(other)
                ended.append(other)
        ended += [other for other in others if other.code is not None]
        server = [self._server] if self._server is not None else []
        failures = [child for child in ended if child.code not in (0, LOST)]
        return next(iter([*_killed([*server, *ended]), *failures]), first)

    def _send(self, number: int) -> None:
        self._signals.append(number)
        self._workers.signal(number)

    def _kill(self) -> int:
        for worker in self._running:
            worker.end(0.0)
        return 128 + self._signals[-1]

    def _start(self, rank: int) -> None:
        folder = folder_of(self._folder, rank, len(self._commands))
        source = DEVNULL if rank else self._stdin
        worker = Worker(rank, self._commands[rank], self._environments[rank], folder, self._screens, source)
        self._running.append(self._workers.add(worker))
        for number in self._signals:  # they came while the workers before it started
            worker.signal(number)

    def _fill(self, finished: int) -> None:
        """Restarts the lost workers whose ranks are free."""
        for rank in [rank for rank, free in self._places.items() if free <= time.monotonic()]:
            del self._places[rank]
            if not (finished or self._signals):
                self._start(rank)

    def _lose_output(self, error: OSError) -> None:
        """Ends the job, because no process reads what it prints. An output's thread calls it."""
        with self._losing:  # standard output and standard error have a thread each
            first = self._lost_output is None
            self._lost_output = self._lost_output or error
        if first:
            self._send(SIGTERM)


def _stopped(result: Mapping[str, Any]) -> bool:
    """Returns whether a worker stopped on request. One that lost its place has the same code and an error."""
    return result["exit_code"] == Preempted.exit_code and "error" not in result


def _killed(children: Sequence[Child]) -> list[Child]:
    return [child for child in children if (child.code or 0) < 0]


def _screens(on_failure: Callable[[OSError], None]) -> tuple[Screen, Screen]:
    """Returns the screens of standard output and standard error: one for both, if both are the same file."""
    out, err = sys.stdout.buffer, sys.stderr.buffer
    if not os.path.sameopenfile(out.fileno(), err.fileno()):
        return Screen(out, on_failure), Screen(err, on_failure)

    def lose_both(error: OSError) -> None:
        drop(err)
        on_failure(error)

    screen = Screen(out, lose_both)
    return screen, screen

"""The workers of one job on this machine. They start together, and stop together when one fails.

Law: one end explains the others. A process that was killed explains all; a worker that exits with 69 reports
what happened to another one, whose exit code then counts.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from signal import SIGPIPE, SIGTERM, SIGUSR1
from subprocess import DEVNULL, PIPE
from threading import Lock, Thread
from typing import Any

from hubring.ps.core.errors import Preempted
from hubring.ps.process.child import Child, Children, first_ended
from hubring.ps.process.output import ChildOutput, SharedScreen, drop_output
from hubring.ps.process.restarts import LOST
from hubring.workers.localrun.supervisor import FailurePolicy, FailureResponse

OUTPUTS = ("stdout", "stderr")
WATCH_SECONDS = 0.2
"""How often the workers are looked after, if none ends."""
QUIT_SECONDS = 5.0
"""How long the workers have to end after a second signal."""
CAUSE_SECONDS = 5.0
"""How long a worker that explains the end of another one has to end."""
SERVERLESS_SECONDS = 20.0
"""How long the workers have to end after a server that failed, or that ended after a signal to stop. They
have its reason, or are stuck in a call that lets no other thread run, so that the server lost them."""
TERMINAL_SECONDS = 0.5
"""How often to look whether this process is in the foreground again."""
QUIET_SECONDS = 5.0
"""The progress line is shown while the script has printed nothing for this long."""
CHUNK_BYTES = 4096
HEAR_SECONDS, LOOK_SECONDS = 5.0, 0.1
"""Seconds to wait for the rest of the output of ended workers: for all together, and at least for each."""


def folder_of(outputs: Path | str | None, rank: int, size: int) -> Path | None:
    """Creates and returns the folder for one worker's output; None without `outputs`."""
    if outputs is None:
        return None
    folder = Path(outputs) / f"rank.{rank:0{len(str(size - 1))}}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class LocalWorker(Child):
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
        screens: Sequence[SharedScreen],
        source: int | None,
    ) -> None:
        super().__init__(f"rank {rank}", command, environment, stdin=source, stdout=PIPE, stderr=PIPE)
        self.rank = rank
        self._outputs = []
        for name, pipe, screen in zip(OUTPUTS, (self.stdout, self.stderr), screens, strict=True):
            mark, copy = f"[{rank}]<{name}>:", folder / name if folder is not None else None
            self._outputs.append(ChildOutput(pipe, screen, mark, copy, keeps_result=name == "stdout"))

    @property
    def wrote_at(self) -> float:
        """When its script last printed something, in monotonic seconds."""
        return max(output.wrote_at for output in self._outputs)

    def hear_out(self, seconds: float) -> dict[str, Any]:
        """Returns the worker's result once all output is written, or after `seconds` for each stream.

        The result is empty if the last line of the worker's output is not one.
        """
        for output in self._outputs:
            output.join(seconds)
        return self._outputs[0].result(0.0)


class LocalTeam:
    """Runs the workers of a job, and waits for all of them.

    Args:
        commands: One command for each rank.
        environments: All environment variables, for each rank.
        folder: Folder for copies of the output, as rank.N/stdout and rank.N/stderr; None: no copies.
        patience: How many failures the job survives; None: none.
        server: The job's server. If it is lost, the workers stop.
        has_finished: Returns whether the worker of a rank had done its work before it was killed.
        progress: File in which rank 0 writes its progress line, to show on this terminal; None: none.

    Attributes:
        results: Rank to the result that the worker printed last; workers without a result are missing.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        folder: Path | None = None,
        patience: FailurePolicy | None = None,
        server: Child | None = None,
        has_finished: Callable[[int], bool] = lambda rank: False,
        progress: Path | None = None,
    ) -> None:
        self._has_finished = has_finished
        self._progress, self._progress_line = progress, ""
        self.results: dict[int, dict[str, Any]] = {}
        self._commands, self._environments, self._folder = commands, environments, folder
        self._patience = patience or FailurePolicy(least=len(commands))
        self._workers: Children[LocalWorker] = Children()
        self._running: list[LocalWorker] = []
        self._server = server
        self._places: dict[int, float] = {}
        """Rank of each worker to restart, to the time at which the rank is free."""
        self._screens = _screens(self._lose_output)
        self._stdin = _stdin_of_rank_0()
        self._lost_output: OSError | None = None
        self._losing = Lock()
        self._asked = 0
        """How many signals the caller forwarded, without notices."""
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
        self._screens[1].write(self, b"", f"ps-run: {text}\n".encode())

    def signal(self, number: int) -> None:
        """Forwards a signal to all workers. After that, no worker is restarted.

        After the second SIGTERM or SIGINT, workers have `QUIT_SECONDS` to end.
        """
        self._asked += number != SIGUSR1  # a notice: the scheduler sends SIGTERM later, as part of it
        if self._asked == 2:
            self._quit_at = time.monotonic() + QUIT_SECONDS
        self._send(number)

    def kill(self) -> None:
        """Kills all workers at once, and what workers that have ended left behind."""
        for worker in self._workers.started:
            worker.kill()

    def run(self, on_failure: Callable[[Child, FailureResponse], None]) -> int:
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
            self._screens[1].close(self._progress or self)
        if self._lost_output is None:
            return code
        if isinstance(self._lost_output, BrokenPipeError):
            return 128 + SIGPIPE
        self.say(f"the output cannot be written: {self._lost_output}; free some space, or redirect it")
        return os.EX_IOERR

    def _supervise(self, on_failure: Callable[[Child, FailureResponse], None]) -> int:
        finished = failed = 0
        with self._workers:
            for rank in range(len(self._commands)):
                self._start(rank)
            while self._running or self._places:
                self._watch_stopping()
                if time.monotonic() > self._quit_at:
                    return self._kill()
                if (server := self._lost_server()) is not None:
                    on_failure(server, FailureResponse.END)
                    return server.exit_code()
                worker = first_ended(self._running, WATCH_SECONDS)
                if worker is None:
                    self._show_progress()
                    self._fill(finished)
                    continue
                self._running.remove(worker)
                late = (worker.code or 0) < 0 and bool(self._running) and self._has_finished(worker.rank)
                finished += late or worker.code == 0
                if late:  # the others hear how the job ended
                    self.say(f"{worker.name} {worker.ended} after it had finished")
                if late or not worker.code:
                    continue
                if self._signals:  # the others end as well, each after what it still has to save
                    failed = failed or self._code_of_stopped(worker)
                    continue
                verdict = self._patience.verdict(len(self._running), finished)
                cause = self._cause(worker) if verdict is FailureResponse.END else worker
                on_failure(cause, verdict)
                if verdict is FailureResponse.END:
                    return cause.exit_code()
                if verdict is FailureResponse.RESTART:
                    self._places[worker.rank] = time.monotonic() + self._patience.pause
        return failed

    def _show_progress(self) -> None:
        if self._progress is None or not self._progress.exists():
            return
        before, self._progress_line = self._progress_line, self._progress.read_text()
        quiet_at = max(worker.wrote_at for worker in self._workers.started) + QUIET_SECONDS
        if self._progress_line not in ("", before) and time.monotonic() > quiet_at:
            line = f"[0] {self._progress_line}"[: shutil.get_terminal_size().columns - 1]
            self._screens[1].write(self._progress, b"", f"\r{line}\x1b[K".encode())

    def _code_of_stopped(self, worker: LocalWorker) -> int:
        # A request that arrives while a worker still imports torch kills it, before it can exit with 75.
        early = -(worker.code or 0) in {SIGTERM, SIGUSR1}.intersection(self._signals)
        return Preempted.exit_code if early else worker.exit_code()

    def _watch_stopping(self) -> None:
        """Counts the time of workers that stop and no longer react, once the server has given them up."""
        ended = self._server is not None and self._server.code is not None
        if ended and self._signals and self._quit_at == math.inf:
            self._quit_at = time.monotonic() + SERVERLESS_SECONDS

    def _lost_server(self) -> Child | None:
        """Returns the server if the workers must stop because it failed.

        A server that was killed sent the workers no reason. One that exited with an error did.
        """
        if self._server is None or self._signals or not self._server.code:
            return None
        if self._server.code > 0 and self._serverless_at == math.inf:
            self._serverless_at = time.monotonic() + SERVERLESS_SECONDS
        killed = self._server.code < 0
        return self._server if killed or time.monotonic() > self._serverless_at else None

    def _cause(self, first: LocalWorker) -> Child:
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
        worker = LocalWorker(
            rank, self._commands[rank], self._environments[rank], folder, self._screens, source
        )
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


def _screens(on_failure: Callable[[OSError], None]) -> tuple[SharedScreen, SharedScreen]:
    """Returns the screens of standard output and standard error: one for both, if both are the same file."""
    out, err = sys.stdout.buffer, sys.stderr.buffer
    if not os.path.sameopenfile(out.fileno(), err.fileno()):
        return SharedScreen(out, on_failure), SharedScreen(err, on_failure)

    def lose_both(error: OSError) -> None:
        drop_output(err)
        on_failure(error)

    screen = SharedScreen(out, lose_both)
    return screen, screen


@cache
def _stdin_of_rank_0() -> int | None:
    """Returns the standard input of rank 0, as `subprocess.Popen` takes it.

    A worker has its own process group, so it cannot read the terminal: the kernel would stop it. A thread
    reads the terminal and writes to a pipe. Rank 0 inherits any other input as it is, so nothing is read from
    it that the script does not read. A restarted rank 0 reads on where the one before it ended.
    """
    if sys.stdin is None:  # closed
        return DEVNULL
    terminal = sys.stdin.fileno()
    if not os.isatty(terminal):
        return None
    pipe, end = os.pipe()
    Thread(target=_carry, args=(terminal, end), name="keyboard", daemon=True).start()
    return pipe


def _carry(terminal: int, end: int) -> None:
    # With the signal blocked, a read in the background fails and does not stop this process.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTIN])
    while True:
        try:
            data = os.read(terminal, CHUNK_BYTES) if _in_foreground(terminal) else None
        except OSError:  # in the background since
            data = None
        if data is None:
            time.sleep(TERMINAL_SECONDS)
        elif data:
            os.write(end, data)
        else:
            os.close(end)
            return


def _in_foreground(terminal: int) -> bool:
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # a terminal without job control for this process
        return True

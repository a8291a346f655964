"""Calls a function in several workers on this machine, which have a server of their own.

    python -m hubring.workers.localrun.functions FD PARENT

is one of the workers. It receives the function through a pipe, calls it, and sends the result. It does not
outlive PARENT, which started it: when PARENT ends, the kernel sends SIGTERM.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import cloudpickle

from hubring.ps.config.declaration import flag_words
from hubring.ps.config.environment import environment, export
from hubring.ps.config.sources import load_worker
from hubring.ps.core.errors import UsageError
from hubring.ps.job.outcome import LeaveReason
from hubring.ps.process.child import Child, Children
from hubring.ps.process.launch import PARENT_VARIABLE, end_with_parent, module_command
from hubring.workers.launchers.known_launchers import (
    LAUNCHER_VARIABLE,
    meeting_variables,
    place_variables,
)
from hubring.workers.localrun.server import LocalServer
from hubring.workers.localrun.settings import LocalJobSettings, settle
from hubring.workers.localrun.team import OUTPUTS, folder_of
from hubring.workers.runtime import context
from hubring.workers.runtime.script_groups import gloo_answered

T = TypeVar("T")
Task = tuple[Callable[..., T], Sequence[Any], Mapping[str, Any]]
"""A function, its arguments and its keyword arguments."""

END_SECONDS = 5.0
"""How long workers have to end once their pipe closed, or once all have sent their results."""


def launch(
    function: Callable[..., T],
    *args: Any,
    nproc: int = 2,
    start_timeout: float = 300.0,
    verbose: bool = False,
    **settings: Any,
) -> list[T]:
    """Calls a function in several workers on this machine, and returns the result of each.

    It starts a server and the workers, and ends them. The function calls `hubring.init()`. It may be defined
    in a notebook or inside another function, and its script needs no `if __name__ == "__main__"`: workers get
    only the function, by cloudpickle.

        losses = hubring.launch(train, 0.1, nproc=4, topology="ring")

    Args:
        function: The function.
        args: Its arguments.
        nproc: Number of workers.
        start_timeout: Seconds within which the server must start.
        verbose: Whether to show the server's log.
        settings: Settings of the server and the workers, named as in `deploy/SETTINGS.md`: `topology`,
            `mode`, `staleness`, `aggregate`, `compress`, `shards`, `lease`, `checkpoint_dir` and other flags
            of `ps-run`.

    Returns:
        The results in rank order.

    Raises:
        UsageError: `nproc` is below 1.
        ConfigError: A setting is unknown or invalid, or settings contradict each other.
        RuntimeError: A worker failed. The message holds its rank and its traceback.
    """
    if nproc < 1:
        raise UsageError(f"nproc={nproc}: expected at least 1")
    chosen = settle(settings, nproc, environment())
    return call((function, args, {}), nproc, chosen, timeout=start_timeout, verbose=verbose)


def call(
    task: Task[T],
    size: int,
    settings: LocalJobSettings,
    *,
    timeout: float,
    verbose: bool = False,
    outputs: Path | str | None = None,
    program: str = sys.executable,
    variables: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> list[T]:
    """Calls a function in each worker of a job, and returns the results in rank order.

    Args:
        task: What each worker calls.
        size: Number of workers.
        settings: Settings of the server and the workers.
        timeout: Seconds within which the server must start.
        verbose: Whether to show the server's log.
        outputs: Folder for the workers' output, as rank.N/stdout and rank.N/stderr; None: not redirected.
        program: The Python interpreter of the workers.
        variables: Returns more environment variables for a rank.

    Raises:
        ServerUnreachable: The server did not start.
        RuntimeError: A worker failed. The message holds its rank and its traceback.
    """
    inherited = {**environment(), PARENT_VARIABLE: str(os.getpid())}
    flags = flag_words(settings.server)
    with (
        meeting_variables({}) as meeting,  # not that of a job in which this process is a worker
        LocalServer(size, flags, inherited, verbose=verbose, timeout=timeout) as server,
    ):
        job = {**settings.worker_variables, "PS_SERVER": server.address, "PS_WORLD_SIZE": str(size)}
        with Children[_Caller]() as callers:
            for rank in range(size):
                caller = callers.add(_Caller(rank, program, folder_of(outputs, rank, size)))
                own = str(rank)
                place = {"PS_RANK": own, "PS_LOCAL_RANK": own, LAUNCHER_VARIABLE: "hubring.launch"}
                place |= meeting | place_variables(rank, size, rank, size, 0)
                caller.ask({**job, **place, **variables(rank)}, task)
            answers = _collect(callers.started)
        if not any(each.joined for each in answers):  # the server still waits for the first worker
            server.end(0.0)
    return [each.result for each in answers]


class CallAnswer(NamedTuple):
    """How a call ended.

    Attributes:
        well: Whether the function returned.
        result: What it returned, or its traceback.
        joined: Whether the function joined the job.
    """

    well: bool
    result: Any
    joined: bool


def answer(pipe: Connection) -> None:
    """Receives `sys.path` and variables, which are needed to unpickle the call, then the call; answers it."""
    sys.path[:], variables = pipe.recv()
    export(variables)
    try:
        function, args, kwargs = cloudpickle.loads(pipe.recv_bytes())
        with gloo_answered(load_worker({})):
            result = function(*args, **kwargs)
        sent = cloudpickle.dumps((True, result, _joined()))
        context.shutdown()
    except BaseException as error:
        sent = cloudpickle.dumps((False, traceback.format_exc(), _joined()))
        context.shutdown(LeaveReason.FAILED, str(error))
    pipe.send_bytes(sent)


def _joined() -> bool:
    return context.started() is not None or bool(context.result())


class _Caller(Child):
    """One worker process and its pipe."""

    def __init__(self, rank: int, program: str, folder: Path | None) -> None:
        self.rank = rank
        self.pipe, there = Pipe()
        words = str(there.fileno()), str(os.getpid())
        command = module_command("hubring.workers.localrun.functions", *words, program=program)
        with there, ExitStack() as files:
            outputs = [files.enter_context((folder / name).open("wb")) for name in OUTPUTS] if folder else []
            stdout, stderr = outputs or (None, None)
            super().__init__(f"rank {rank}", command, stdout=stdout, stderr=stderr, pass_fds=[there.fileno()])

    def ask(self, variables: dict[str, str], task: Task[Any]) -> None:
        """Sends the call.

        Raises:
            RuntimeError: The worker ended.
        """
        call = cloudpickle.dumps(task)
        try:
            self.pipe.send((sys.path, variables))
            self.pipe.send_bytes(call)
        except OSError as cause:
            raise self._gone() from cause

    def answer(self) -> CallAnswer:
        """Receives the answer.

        Raises:
            RuntimeError: The worker failed.
        """
        try:
            came = self.pipe.recv_bytes()
        except (EOFError, OSError) as cause:  # OSError: it ended before it read all of the call
            raise self._gone() from cause
        found = CallAnswer(*cloudpickle.loads(came))
        if not found.well:
            raise RuntimeError(f"{self.name} failed:\n{found.result}")
        return found

    def _gone(self) -> RuntimeError:
        self.wait(END_SECONDS)
        return RuntimeError(f"{self.name} {self.ended or 'ended'} before it returned a result")

    def end(self, seconds: float) -> None:
        super().end(seconds)
        self.pipe.close()


def _collect(callers: Sequence[_Caller]) -> list[CallAnswer]:
    """Returns the answers of all workers. The first failure ends the others.

    After the answers, the workers have `END_SECONDS` to end. A thread that a function started may never end.
    """
    waiting = {caller.pipe: caller for caller in callers}
    answers: dict[int, CallAnswer] = {}
    while waiting:
        for pipe in wait(list(waiting)):
            assert isinstance(pipe, Connection)
            caller = waiting.pop(pipe)
            answers[caller.rank] = caller.answer()
    deadline = time.monotonic() + END_SECONDS
    for caller in callers:
        caller.wait(max(0.0, deadline - time.monotonic()))
    return [answers[rank] for rank in sorted(answers)]


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    answer(Connection(int(sys.argv[1])))

"""Starts the programs of built-in jobs as forks of a process that has imported torch.

A new process needs seconds to import torch, and as long again for its first optimizer: most of the time of a
short training. A fork computes the same at the same speed, from 60 MB less: it does not count torch's files.
A user's script runs in new processes: a fork finds other modules imported, and shares the seed of hashes.

The fork server reads requests: a program to start, whose process id it answers, or such an id, to which it
answers the exit code. An empty line or the end of input ends it, and its end kills the programs.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import Any, NoReturn

from hubring.ps.config.environment import become, silence_grpc, spare_forks
from hubring.ps.core.errors import HubringError
from hubring.ps.process.child import Child, Children
from hubring.ps.process.launch import end_after, end_with_parent, module_command
from hubring.workers.peers.processes import RunProcess, StartProgram, clean_environment

IMPORTED = ("torch._dynamo", "hubring.ps.server", "hubring.workers.run_script")
"""The first optimizer imports torch._dynamo."""
LOOK_SECONDS = 0.02
_PYTHON = module_command("")[:-1]


class ForkServer(Child):
    """The process that forks, as its parent sees it. Used by one thread at a time.

    Args:
        threads: PyTorch threads of the programs: libraries read that when they are loaded.
    """

    def __init__(self, threads: int) -> None:
        command = module_command(__name__)
        super().__init__("the fork server", command, clean_environment(threads), stdin=PIPE, stdout=PIPE)

    def start(
        self, name: str, command: Sequence[str], directory: Path, environment: Mapping[str, str]
    ) -> RunProcess:
        """Starts a `module_command`, as `LocalProcess` does."""
        return ForkedProcess(self, name, command, directory, environment)

    def ask(self, request: Mapping[str, Any] | int) -> Any:
        """Sends a request and returns the answer.

        Raises:
            HubringError: The fork server was killed.
        """
        try:
            with suppress(BrokenPipeError):
                self.tell(json.dumps(request))
            answer = self.stdout.readline()
        except BaseException:  # interrupted: the next answer would be to this request
            self.kill()
            raise
        if answer:
            return json.loads(answer)
        self.wait()
        raise HubringError(f"{self} {self.ended}")

    def end(self, seconds: float) -> None:
        super().end(seconds)
        self.stdout.close()


class ForkServers(Children[ForkServer]):
    """A fork server for each number of threads. Leaving the `with` block ends them."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, ForkServer] = {}

    def starter(self, threads: int) -> StartProgram:
        """Returns a function that starts a program with so many PyTorch threads."""
        if threads not in self._known:
            self._known[threads] = self.add(ForkServer(threads))
        return self._known[threads].start


class ForkedProcess(RunProcess):
    """A program that the fork server started."""

    def __init__(
        self,
        server: ForkServer,
        name: str,
        command: Sequence[str],
        directory: Path,
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(name, command, directory)
        self._server = server
        self._code: int | None = None
        files = [str(file.absolute()) for file in (self.out, self.err)]
        asked = {"words": command[len(_PYTHON) :], "files": files, "folder": os.getcwd()}
        self._pid: int = server.ask({**asked, "environment": dict(environment)})

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def code(self) -> int | None:
        if self._code is None:
            self._code = -signal.SIGKILL if self._server.ended else self._server.ask(self._pid)
        return self._code

    def ask_to_stop(self) -> None:
        if self.code is None:
            os.kill(self._pid, signal.SIGTERM)

    def end(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.code is None and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        if self.code is None:
            os.killpg(self._pid, signal.SIGKILL)
        while self.code is None:
            time.sleep(LOOK_SECONDS)


def main() -> None:
    """Serves requests until the standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # for what an import prints
    spare_forks()
    silence_grpc()
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection would copy the memory that forks share
    while line := sys.stdin.readline().strip():
        asked = json.loads(line)
        answer = _exit_code(asked) if isinstance(asked, int) else _fork(asked)
        with suppress(BrokenPipeError):  # the input ends too
            print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # there is nothing to unload


def _exit_code(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _fork(asked: dict[str, Any]) -> int:
    begun, begins = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        end_with_parent(parent, signal.SIGKILL)
        os.setsid()
        os.close(begun)
        os.close(begins)
        _become_program(**asked)
    os.close(begins)
    os.read(begun, 1)  # ends once the program leads a session, which can be killed
    os.close(begun)
    return pid


def _become_program(words: list[str], files: list[str], folder: str, environment: dict[str, str]) -> NoReturn:
    """Sets this fork up like a new Python process, and runs the module."""
    import numpy as np

    for number, name in enumerate([os.devnull, *files]):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC if number else os.O_RDONLY, 0o666)
        os.dup2(file, number)
        os.close(file)
    become(environment)
    os.chdir(folder)
    np.random.seed(None)  # else all programs would draw the same numbers
    module, *sys.argv[1:] = words
    end_after(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))


if __name__ == "__main__":
    main()

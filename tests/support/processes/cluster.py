"""Real processes for system tests: a server and workers, which do not outlive the test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ControlStub
from hubring.ps.security.access import find_access
from hubring.ps.security.guard import Role
from hubring.ps.transport.grpc.channel import open_channel
from tests.support.processes.fork_server import Forked, ForkServer
from tests.support.processes.process_tree import entry, runs
from tests.support.processes.stopwatch import Stopwatch

SCRIPTS = Path(__file__).parents[1] / "scripts"
SMALL = str(SCRIPTS / "small.py")
TRAIN = str(Path(__file__).parents[3] / "workers" / "examples" / "train.py")
MEASURED = str(SCRIPTS / "measured.py")
PATIENCE = 90.0
"""Stopwatch seconds within which a program must finish its work."""
LOOK_SECONDS = 0.5
THEN_RUN = ' && exec "$@"'


def measured(steps: int, *more: str, go: Path | str = "") -> list[str]:
    """Returns arguments for `ps-compare`: a script with this number of steps, and more."""
    return ["run", "--script", MEASURED, "--metric", "fit", "--arguments", f"{steps} {{seed}} {go}", *more]


@dataclass
class Program:
    """One started program; its output goes to files."""

    name: str
    process: subprocess.Popen[bytes] | Forked
    out: Path
    err: Path

    def wait(self, timeout: float = PATIENCE) -> int:
        """Waits up to `timeout` stopwatch seconds until the program ends; returns the exit code."""
        watch = Stopwatch()
        while True:
            try:
                return self.process.wait(LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                assert watch.seconds < timeout, f"{self.name} still runs after {timeout} s:\n{self.said()}"

    def said(self) -> str:
        return self.err.read_text()

    def result(self) -> dict[str, Any]:
        lines = self.out.read_text().splitlines()
        assert lines, f"{self.name} printed nothing:\n{self.said()}"
        return json.loads(lines[-1])

    def children(self, module: str) -> list[int]:
        """Returns the child processes that run this module."""
        pid = self.process.pid
        started = map(int, entry(pid, f"task/{pid}/children").split())
        return [child for child in started if runs(child, module)]

    def done(self, code: int = 0, timeout: float = PATIENCE) -> dict[str, Any]:
        """Waits until the program ends, asserts the exit code, and returns the last line's object."""
        got = self.wait(timeout)
        assert got == code, f"{self.name} exited with {got} instead of {code}:\n{self.said()}"
        return self.result()

    def until(self, condition: Callable[[], bool], what: str, timeout: float = PATIENCE) -> None:
        """Waits for a condition while the program runs; checks it once more after the program ends."""
        watch, looked = Stopwatch(), time.monotonic()
        ended = False
        while not condition():
            assert not ended, f"{self.name} ended before {what}:\n{self.said()}"
            ended = self.process.poll() is not None
            if time.monotonic() - looked > LOOK_SECONDS:
                assert watch.seconds < timeout, f"no {what} within {timeout} s:\n{self.said()}"
                looked = time.monotonic()
            time.sleep(0.02)

    def until_said(self, words: str, timeout: float = PATIENCE) -> None:
        self.until(lambda: words in self.said(), repr(words), timeout)


def await_all(programs: Iterable[Program], words: str) -> None:
    """Waits until each of these programs has said the words."""
    for program in programs:
        program.until_said(words)


class Cluster:
    """Starts programs in a folder, and ends those that still run.

    With a fork server, Hubring's programs on this host are forks of it.
    """

    def __init__(self, folder: Path, fork_server: ForkServer | None = None) -> None:
        self.folder = folder
        self.go = folder / "go"
        """Workers that `held` starts go on once it is there."""
        self._fork_server = fork_server
        self.programs: list[Program] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.end()

    def run(
        self,
        name: str,
        module: str,
        *arguments: str,
        within: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> Program:
        """Starts a module; `within` is a command prefix that runs the module on another host.

        With a prefix the module runs in a new Python process, except for `ip netns exec NAME` and mounts of
        its own, because a fork can enter such namespaces.
        """
        fork_server, place, variables = self._fork_server, _namespace(within), variables or {}
        of_python = any(variable.startswith("PYTHON") for variable in variables)  # is read as one starts
        if fork_server is None or place is None or of_python:
            return self._start(name, [*within, sys.executable, "-m", module, *arguments], variables)
        environment = {**self._environment(), **variables}
        return self._add(
            name, lambda out, err: fork_server.start(module, arguments, environment, out, err, **place)
        )

    def start(self, name: str, command: Sequence[str], variables: Mapping[str, str] | None = None) -> Program:
        """Starts a command with the test's and these variables; a Python module as `run` does."""
        if list(command[:2]) == [sys.executable, "-m"]:
            return self.run(name, command[2], *command[3:], variables=variables)
        return self._start(name, command, variables or {})

    def _start(self, name: str, command: Sequence[str], variables: Mapping[str, str]) -> Program:
        def started(out: BinaryIO, err: BinaryIO) -> subprocess.Popen[bytes]:
            environment = {**self._environment(), **variables}
            return subprocess.Popen(
                command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=environment
            )

        return self._add(name, started)

    @staticmethod
    def _environment() -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1"}

    def _add(
        self, name: str, started: Callable[[BinaryIO, BinaryIO], subprocess.Popen[bytes] | Forked]
    ) -> Program:
        out, err = self.folder / f"{name}.out", self.folder / f"{name}.err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = started(stdout, stderr)
        program = Program(name, process, out, err)
        self.programs.append(program)
        return program

    def server(
        self, *arguments: str, name: str = "server", within: Sequence[str] = ()
    ) -> tuple[Program, str]:
        """Starts a server on a free port; returns the program and its address."""
        file = self.folder / f"{name}.address"
        command = ["start", "--port", "0", "--address-file", str(file), *arguments]
        program = self.run(name, "hubring.ps.cli", *command, within=within)
        program.until(file.exists, "address")
        return program, file.read_text().strip()

    def worker(
        self, server: str, *arguments: str, name: str | None = None, within: Sequence[str] = ()
    ) -> Program:
        name = name or f"worker{sum(program.name.startswith('worker') for program in self.programs)}"
        return self.run(
            name, "hubring.workers.programs.ps_worker", "--server", server, *arguments, within=within
        )

    def ranks(self, server: str, count: int, *arguments: str, **settings: Any) -> list[Program]:
        """Starts a worker for each rank."""
        return [self.worker(server, "--rank", str(rank), *arguments, **settings) for rank in range(count)]

    def held(
        self,
        server: str,
        *flags: str,
        count: int = 2,
        steps: int = 60,
        at: int = 20,
        script: str = SMALL,
        **settings: Any,
    ) -> list[Program]:
        """Starts workers that hold at a step until `go` is there."""
        words = (script, str(steps), "16", "hold", str(self.go), str(at))
        workers = self.ranks(server, count, *flags, *words, **settings)
        await_all(workers, f"holding at {at}")
        return workers

    def step(self, server: str) -> int:
        """Returns the step that all workers have taken; 0 before there are any."""
        return min((worker["step"] for worker in self.status(server)["workers"]), default=0)

    def status(self, address: str) -> dict[str, Any]:
        """Returns the output of `ps-server status`, without a new process."""
        with self.asking(address) as status:
            return status()

    @contextmanager
    def asking(self, address: str) -> Iterator[Callable[[], dict[str, Any]]]:
        """Gives `status` as a function that asks on one connection."""
        with open_channel(address, find_access(address, Role.READER, None, PATIENCE)) as channel:
            stub = ControlStub(channel)
            yield lambda: json.loads(stub.Status(pb.StatusRequest(), timeout=PATIENCE).json)

    def kill(self) -> None:
        """Ends the running programs."""
        for program in self.programs:
            if program.process.poll() is None:
                program.process.send_signal(signal.SIGCONT)
                program.process.kill()
                program.process.wait()

    def end(self) -> None:
        """Ends the running programs. If the test fails, pytest shows the output of all programs."""
        self.kill()
        for program in self.programs:
            print(f"{program.name} said:\n{program.said()}")


def mounted(what: str) -> list[str]:
    """What runs a command that sees other mounts than other processes; `what` is a shell command."""
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *as_root, "--mount", "sh", "-c", f"{what}{THEN_RUN}", "sh"]


def _namespace(within: Sequence[str]) -> dict[str, str] | None:
    """Returns the network namespace or the mounts of a command prefix; None: another kind of prefix."""
    match list(within):
        case []:
            return {}
        case ["ip", "netns", "exec", name]:
            return {"network": name}
        case ["unshare", "--mount", "sh", "-c", what, "sh"] if what.endswith(THEN_RUN):
            return {"mounts": what.removesuffix(THEN_RUN)}
    return None

"""The processes of one row, which wait for their turn.

They are forks of a server that has imported torch: a new Python process needs more than two seconds of CPU
time before it has an optimizer, and a case has thirty processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from hubring.ps.config.environment import become
from hubring.ps.core.errors import ConnectionLost, DeadlineExceeded
from hubring.ps.process.launch import module_command
from hubring.workers.bench.job import BenchJob, MemberLine
from hubring.workers.bench.row import BenchRow
from hubring.workers.peers import machine
from hubring.workers.peers.processes import (
    LocalProcess,
    ProcessFailed,
    RunProcess,
    RunProcesses,
    await_address,
)
from hubring.workers.peers.rows import mpirun


def cpu_seconds(session: int) -> float:
    """Returns the CPU seconds that the living processes of a session have used.

    Args:
        session: Id of the session, which is the pid of its leader.
    """
    used = 0.0
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):  # the process has just ended
            if os.getsid(process.pid) == session:
                used += sum(process.cpu_times()[:2])
    return used


_SERVER = multiprocessing.get_context("forkserver")
# Not imported, since only the rows' processes need this module.
MEMBER = "hubring.workers.bench.member"
# The first optimizer imports torch._dynamo, which is half of that time.
_PRELOADED = ["torch._dynamo", "hubring.workers.run_script", "hubring.workers.bench.libraries", MEMBER]
_SERVER.set_forkserver_preload(_PRELOADED)


class Forked(RunProcess):
    """A child that runs a module's `main()`, like `python -m MODULE ARGUMENTS`; see `RunProcess`."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        directory: Path,
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(name, module_command(module, *arguments), directory)
        self.err.touch()
        passed = (module, list(arguments), str(self.out), str(self.err), dict(environment))
        self._forked = _SERVER.Process(target=_run, args=passed, daemon=True)
        self._forked.start()

    @property
    def pid(self) -> int:
        assert self._forked.pid is not None
        return self._forked.pid

    @property
    def code(self) -> int | None:
        return self._forked.exitcode

    def ask_to_stop(self) -> None:
        self._forked.terminate()

    def end(self, timeout: float) -> None:
        self._forked.join(timeout)
        if self.code is None:
            with suppress(ProcessLookupError):  # it has no session yet
                os.killpg(self.pid, signal.SIGKILL)
            self._forked.kill()
            self._forked.join()


def _run(module: str, arguments: list[str], out: str, err: str, environment: dict[str, str]) -> None:
    """In the child: sets the child up like a new process, then runs the module."""
    import torch

    os.setsid()
    for path, target in ((out, 1), (err, 2)):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), target)
    become(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # torch read the fork server's value at import
    sys.argv = [module, *arguments]
    import_module(module).main()


class BenchTurn(NamedTuple):
    """The result of a turn: the slowest rank's seconds of every step, and the wrong elements of all ranks."""

    seconds: list[float]
    wrong: int


class BenchTeam:
    """The members of one row, and its server, if any. The server starts immediately.

    Args:
        row: The row.
        job: The job for the members; its directory belongs to this row.
        shards: Shards of a hub without colocated shards; None: the row's default.
        processes: Starts and ends the processes.
    """

    def __init__(self, row: BenchRow, job: BenchJob, shards: int | None, processes: RunProcesses) -> None:
        self.row = row
        self._job = job
        self.shards = shards_of(row, job.size, shards)
        self._processes = processes
        self._count = row.members or job.size
        self._lines: list[MemberLine] = []
        self._idle_cpu = self._idle_wall = 0.0
        self._idle_since: tuple[float, float] | None = None
        self._address = job.place / "address"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(job.control))
        self._listener.listen()
        self._listener.setblocking(False)
        self._started = [] if row.server is None else [self._serve()]

    def start(self) -> None:
        """Starts the members; raises as `RunProcesses.pause`."""
        self._started += self._members()

    def meet(self) -> None:
        """Returns once every member waits for requests; raises as `RunProcesses.pause`."""
        while len(self._lines) < self._count:
            try:
                self._lines.append(MemberLine(self._listener.accept()[0]))
            except BlockingIOError:
                self._processes.pause(f"the members of {self.row.name}")
        self._listener.close()

    def turn(self, steps: int) -> BenchTurn:
        """Runs a turn of some steps on all members.

        Raises:
            ProcessFailed: A process of any row ended. The message holds the end of the logs.
            DeadlineExceeded: The case took longer than the timeout.
        """
        if self._idle_since is not None:
            cpu, wall = self._idle_since
            self._idle_cpu += self._cpu() - cpu
            self._idle_wall += time.monotonic() - wall
        try:
            replies = self._take(steps)
        except ConnectionLost as lost:
            for _ in range(20):  # whatever closed its connection ends now
                self._processes.pause(f"the end of a process of row {self.row.name}")
            tails = "\n".join(process.tail() for process in self._started)
            raise ProcessFailed(f"a process of row {self.row.name} ended during a turn; {tails}") from lost
        self._idle_since = self._cpu(), time.monotonic()
        seconds = [max(step) for step in zip(*(reply["seconds"] for reply in replies), strict=True)]
        return BenchTurn(seconds, wrong_in(replies, self._job.nbytes // 4))

    @property
    def idle_cores(self) -> float:
        """Cores that the row used during the turns of other rows; should be about 0."""
        return self._idle_cpu / self._idle_wall if self._idle_wall else 0.0

    def dismiss(self) -> None:
        """Closes the connections, which ends the members."""
        for line in self._lines:
            line.close()

    def _take(self, steps: int) -> list[dict[str, Any]]:
        together = self._count > 1
        for line in self._lines:
            line.tell(f"{steps} {'together' if together else 'alone'}")
        for _ in range(2 * steps if together else 0):  # before each step, and after it
            for line in self._lines:
                self._hear(line)
            for line in self._lines:
                line.tell("go")
        return [json.loads(self._hear(line)) for line in self._lines]

    def _hear(self, line: MemberLine) -> str:
        """Returns a member's next line. It may wait for minutes for another one that was killed."""
        while True:
            with suppress(DeadlineExceeded):
                return line.hear(1.0)
            self._processes.pause(f"the members of {self.row.name}")

    def _cpu(self) -> float:
        return sum(cpu_seconds(each.pid) for each in self._started if each.pid is not None)

    # The start of the processes.

    def _serve(self) -> RunProcess:
        size = ["--workers", str(self._job.size)]
        if self.row.transport != "shm":  # over a wire, the same slices as raw-tcp; otherwise the default
            size += ["--slice-bytes", str(self._job.slice_bytes)]
        shards = ["--colocate"] if self.row.colocated else ["--shards", str(self.shards)]
        flags = ["--no-page", "--once", "--port", "0", "--address-file", str(self._address), *size, *shards]
        command = module_command("hubring.ps.cli", "start", *flags, *(self.row.server or ()))
        return self._processes.start(f"{self.row.name} server", command)

    def _members(self) -> Iterator[RunProcess]:
        name, ranks = self.row.name, range(self._count)
        if self.row.peer is not None and self.row.peer.launched:
            commands = [module_command(MEMBER, *self._arguments(rank)) for rank in ranks]
            yield self._processes.start(name, mpirun(commands))
            return
        if beside := self._beside():
            yield self._fork(f"{name} server", *beside)
        for rank in ranks:
            command = [MEMBER] if self.row.server is None else self._worker(rank)
            start = self._fork if self.row.device == "cpu" else partial(self._spawn, rank)
            yield start(f"{name} rank {rank}", *command, *self._arguments(rank))

    def _beside(self) -> list[str]:
        """Returns the module and arguments of a server that is not a hub; empty without one."""
        if self.row.peer is not None and self.row.peer.served:
            return self.row.peer.serve(self._job.size, self._job.meet)
        module, *arguments = self.row.beside or ("",)
        return [module, self._job.encode(), *arguments] if module else []

    def _fork(self, name: str, module: str, *arguments: str) -> RunProcess:
        place = self._processes.directory, self._processes.environment
        return self._processes.add(Forked(name, module, arguments, *place))

    def _spawn(self, rank: int, name: str, module: str, *arguments: str) -> RunProcess:
        """Starts a process for a GPU. A fork cannot use CUDA if its parent has initialized CUDA."""
        environment = self._processes.environment
        own = machine.gpu_variables(rank, self._count, machine.gpu_count(), environment)
        place = self._processes.directory, {**environment, **own}
        return self._processes.add(LocalProcess(name, module_command(module, *arguments), *place))

    def _arguments(self, rank: int) -> list[str]:
        side = self.row.training if self._job.trained else self.row.side
        return [f"hubring.workers.bench.{side}", self._job.encode(), str(rank)]

    def _worker(self, rank: int) -> list[str]:
        server = ["--server", await_address(self._processes, self._address)]
        place = ["--rank", str(rank), "--local-rank", str(rank), "--world-size", str(self._job.size)]
        script = str(Path(__file__).with_name("member.py"))
        return ["hubring.workers.programs.ps_worker", *server, *place, *self.row.worker, script]


def wrong_in(replies: Sequence[dict[str, Any]], numel: int) -> int:
    """Returns the wrong elements of all ranks; each additional digest counts as a whole wrong model."""
    apart = len({reply["digest"] for reply in replies}) - 1
    return sum(int(reply["wrong"]) for reply in replies) + apart * numel


def shards_of(row: BenchRow, size: int, asked: int | None) -> int:
    """Returns the row's number of shards: one per worker, the requested number, the default, or 0."""
    if row.colocated:
        return size
    return (asked or row.shards) if row.transport else 0

"""Child processes of a run: their environment, output to files, supervision and a reliable stop.

The lifeline ends them even if this process gets SIGKILL, which it cannot handle itself. It is a process that
reads from a pipe whose other end only this process holds. This process sends the id of each child that it
starts, and again when the child has ended. When the pipe closes, the lifeline kills the sessions of the
remaining children.
"""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

from hubring.ps.config.environment import environment
from hubring.ps.core.errors import DeadlineExceeded, HubringError
from hubring.ps.process.child import Child, Children, ending
from hubring.workers.peers import child_reaper


class Lifeline:
    """This process's end; leaving the `with` block ends the lifeline."""

    def __enter__(self) -> Lifeline:
        # Isolated, so that neither installed packages nor the environment can break its start.
        command = [sys.executable, "-I", "-S", child_reaper.__file__]
        self._child = Child("the lifeline", command, stdin=PIPE, session=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._child.ask_to_stop()
        self._child.wait()

    def hold(self, pid: int) -> None:
        """Adds a child, whose session is killed if this process is killed."""
        self._child.tell(f"+{pid}")

    def release(self, pid: int) -> None:
        """Removes a child that has ended, because its id can be reused."""
        self._child.tell(f"-{pid}")


_OF_LAUNCHERS = (
    "PS_",
    "SLURM_",
    "OMPI_",
    "PMI",
    "MPI_LOCAL",
    "TORCHELASTIC_",
    "HOROVOD_",
    "HUBRING_LAUNCHER",
)
_OF_TORCHRUN = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
}
_OF_PODS = {"JOB_COMPLETION_INDEX", "KUBERNETES_SERVICE_HOST"}

POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0
"""Time for a process to end after SIGTERM."""


class ProcessFailed(HubringError):
    """A child exited with an error; the message shows the end of its output."""


class RunProcess(ABC):
    """One program of a run, on this machine or another; its output files are visible here.

    Args:
        name: Name for people and for the output files.
        command: Program and arguments.
        directory: Folder for `NAME.out` and `NAME.err`.

    Attributes:
        expendable: Its failure does not fail the run.
    """

    def __init__(self, name: str, command: Sequence[str], directory: Path) -> None:
        self.name = name
        self.expendable = False
        self.command = tuple(command)
        self.out, self.err = directory / f"{name}.out", directory / f"{name}.err"

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """Id of the process and of its session on this machine; None on another machine."""

    @property
    @abstractmethod
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""

    @abstractmethod
    def ask_to_stop(self) -> None:
        """Sends SIGTERM if the process is known to run."""

    @abstractmethod
    def end(self, timeout: float) -> None:
        """Waits until it has ended; after `timeout` seconds kills it and all that it started."""

    def result(self) -> dict[str, Any]:
        """Returns the JSON object in the last line of its standard output.

        Raises:
            ProcessFailed: There is no such line.
        """
        lines = self.out.read_text(errors="replace").splitlines()
        try:
            result = json.loads(lines[-1])
        except (IndexError, ValueError) as cause:
            raise ProcessFailed(f"{self.name} ended without a JSON object; {self.tail()}") from cause
        if not isinstance(result, dict):
            raise ProcessFailed(f"{self.name} ended with {lines[-1]!r}; expected a JSON object")
        return result

    def tail(self, lines: int = 15) -> str:
        """Returns the end of its standard error and the path of the file."""
        output = self.err.read_text(errors="replace").splitlines()[-lines:]
        return f"the end of {self.err}:\n" + "\n".join(f"  {line}" for line in output)


class LocalProcess(Child, RunProcess):
    """A child of this process. It has its own session, so Ctrl-C does not reach it directly.

    Args:
        name: Name for people and for the output files.
        command: Program and arguments.
        directory: Folder for `NAME.out` and `NAME.err`.
        environment: All environment variables.
    """

    def __init__(
        self, name: str, command: Sequence[str], directory: Path, environment: Mapping[str, str]
    ) -> None:
        RunProcess.__init__(self, name, command, directory)
        with self.out.open("wb") as out, self.err.open("wb") as err:
            Child.__init__(self, name, command, environment, stdout=out, stderr=err, session=True)


StartProgram = Callable[[str, Sequence[str], Path, Mapping[str, str]], RunProcess]
"""Starts a program; same arguments as `LocalProcess`."""


class RunProcesses(Children[RunProcess]):
    """All children of one run; leaving the `with` block ends them.

    Args:
        directory: Existing folder for their output.
        environment: All environment variables.
        timeout: Limit of the run in seconds.
        lifeline: Ends them if this process is killed; None: no lifeline.
        start: Starts a program on its host.
    """

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str],
        timeout: float,
        lifeline: Lifeline | None = None,
        start: StartProgram = LocalProcess,
    ) -> None:
        super().__init__(GRACE_SECONDS)
        self.directory = directory
        self.environment = environment
        self._lifeline = lifeline
        self._start = start
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout

    def start(self, name: str, command: Sequence[str]) -> RunProcess:
        """Starts a child; same arguments as `LocalProcess`."""
        return self.add(self._start(name, command, self.directory, self.environment))

    def add(self, child: RunProcess) -> RunProcess:
        super().add(child)
        if self._lifeline is not None and child.pid is not None:
            self._lifeline.hold(child.pid)
        return child

    def _end_one(self, child: RunProcess, seconds: float) -> None:
        super()._end_one(child, seconds)
        if self._lifeline is not None and child.pid is not None:
            self._lifeline.release(child.pid)

    def running(self) -> list[RunProcess]:
        """Returns the children that have not ended.

        Raises:
            ProcessFailed: A child failed. Of several, one that a signal has killed is named: the others may
                only have lost it.
        """
        codes = {process: process.code for process in self.started}
        failed = [(code, process) for process, code in codes.items() if code and not process.expendable]
        if failed:
            code, process = min(failed, key=lambda each: each[0] > 0)
            raise ProcessFailed(f"{process.name} {ending(code)}; {process.tail()}")
        return [process for process, code in codes.items() if code is None]

    def pause(self, awaited: str) -> None:
        """Sleeps briefly while waiting for something from the children.

        Raises:
            ProcessFailed: A child failed.
            DeadlineExceeded: The run's time limit has passed.
        """
        late = self.running()
        if time.monotonic() > self._deadline:
            tails = "\n".join(f"{process.name} is still running; {process.tail(5)}" for process in late)
            raise DeadlineExceeded(f"waited {self._timeout:g} s (--timeout) for {awaited}\n{tails}")
        time.sleep(POLL_SECONDS)


def clean_environment(threads: int) -> dict[str, str]:
    """Returns this process's variables without settings and launchers, so that command lines decide.

    Args:
        threads: PyTorch threads of every process.
    """
    rest = {
        name: value
        for name, value in environment().items()
        if name not in _OF_TORCHRUN | _OF_PODS and not name.startswith(_OF_LAUNCHERS)
    }
    return rest | {"OMP_NUM_THREADS": str(threads)}


def await_address(processes: RunProcesses, file: Path) -> str:
    """Waits for the address that a server writes into `file`; raises as `RunProcesses.pause`."""
    while not file.exists() or not (address := file.read_text().strip()):
        processes.pause("the server's address")
    return address

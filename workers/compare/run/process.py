"""Child processes: output to files, supervision and a reliable stop."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hubring.ps.core.errors import DeadlineExceeded, HubringError
from hubring.ps.process.child import Child
from hubring.ps.process.children import Children
from hubring.workers.compare.run.child_reaper_start import Lifeline

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


class Process(Child, RunProcess):
    """A child of this process. It has its own session, so Ctrl-C does not reach it directly.

    Args:
        name: Name for people and for the output files.
        command: Program and arguments.
        directory: Folder for `NAME.out` and `NAME.err`.
        environment: All environment variables.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        directory: Path,
        environment: Mapping[str, str],
    ) -> None:
        RunProcess.__init__(self, name, command, directory)
        with self.out.open("wb") as out, self.err.open("wb") as err:
            Child.__init__(self, name, command, environment, stdout=out, stderr=err, session=True)


Start = Callable[[str, Sequence[str], Path, Mapping[str, str]], RunProcess]
"""Starts a program; same arguments as `Process`."""


class Processes(Children[RunProcess]):
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
        start: Start = Process,
    ) -> None:
        super().__init__(GRACE_SECONDS)
        self.directory = directory
        self.environment = environment
        self._lifeline = lifeline
        self._start = start
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout

    def start(self, name: str, command: Sequence[str]) -> RunProcess:
        """Starts a child; same arguments as `Process`."""
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
            ProcessFailed: A child failed.
        """
        codes = {process: process.code for process in self.started}
        for process, code in codes.items():
            if code and not process.expendable:
                raise ProcessFailed(f"{process.name} exited with {code}; {process.tail()}")
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

"""Child processes: started with their output in files, watched, and stopped for certain."""

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
"""What a process is given to end by itself once it was asked to."""


class ProcessFailed(HubringError):
    """A child ended with an error; the message shows the end of what it said."""


class RunProcess(ABC):
    """One program of a run, on this machine or another, with its output in files that are seen here.

    Args:
        name: What people call it.
        command: Program and arguments.
        directory: Where `NAME.out` and `NAME.err` are written.

    Attributes:
        expendable: Its end with an error is no failure of the whole.
    """

    def __init__(self, name: str, command: Sequence[str], directory: Path) -> None:
        self.name = name
        self.expendable = False
        self.command = tuple(command)
        self.out, self.err = directory / f"{name}.out", directory / f"{name}.err"

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """Its id on this machine, which is also that of its session; None where it runs on another."""

    @property
    @abstractmethod
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""

    @abstractmethod
    def ask_to_stop(self) -> None:
        """Sends SIGTERM, once it is known to run."""

    @abstractmethod
    def end(self, timeout: float) -> None:
        """Returns once it has ended; after `timeout` seconds it is killed with all that it started."""

    def result(self) -> dict[str, Any]:
        """The JSON object in the last line of its standard output.

        Raises:
            ProcessFailed: There is none.
        """
        lines = self.out.read_text(errors="replace").splitlines()
        try:
            result = json.loads(lines[-1])
        except (IndexError, ValueError) as cause:
            raise ProcessFailed(f"{self.name} ended without a JSON object; {self.tail()}") from cause
        if not isinstance(result, dict):
            raise ProcessFailed(f"{self.name} ended with {lines[-1]!r}, not with a JSON object")
        return result

    def tail(self, lines: int = 15) -> str:
        """The end of its standard error, and where the rest lies."""
        said = self.err.read_text(errors="replace").splitlines()[-lines:]
        return f"the end of {self.err}:\n" + "\n".join(f"  {line}" for line in said)


class Process(Child, RunProcess):
    """A child of this process. Its session is its own, so that Ctrl-C reaches it through its parent alone.

    Args:
        name: What people call it.
        command: Program and arguments.
        directory: Where `NAME.out` and `NAME.err` are written.
        environment: All of its variables.
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
"""Starts a program; the arguments are `Process`'s."""


class Processes(Children[RunProcess]):
    """All children of one run; leaving the `with` block ends them.

    Args:
        directory: Where their output goes; exists.
        environment: All of their variables.
        timeout: Seconds that all of them together may take.
        lifeline: Ends them if this process is killed; None: nobody does.
        start: Starts one where it belongs.
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
        """Starts one more; the arguments are `Process`'s."""
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
        """Those that have not ended.

        Raises:
            ProcessFailed: One of them has failed.
        """
        codes = {process: process.code for process in self.started}
        for process, code in codes.items():
            if code and not process.expendable:
                raise ProcessFailed(f"{process.name} ended with exit code {code}; {process.tail()}")
        return [process for process, code in codes.items() if code is None]

    def pause(self, awaited: str) -> None:
        """Lets a moment pass while something is awaited from the children.

        Raises:
            ProcessFailed: One of them has failed, so that waiting is in vain.
            DeadlineExceeded: The time for all of them is up.
        """
        late = self.running()
        if time.monotonic() > self._deadline:
            said = "\n".join(f"{process.name} still runs; {process.tail(5)}" for process in late)
            raise DeadlineExceeded(f"{awaited} did not come within {self._timeout:g} s (--timeout)\n{said}")
        time.sleep(POLL_SECONDS)

"""Child processes: started with their output in files, watched, and stopped for certain."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from hubring.ps.core.errors import DeadlineExceeded, HubringError
from hubring.workers.compare.lifeline import Lifeline

POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0
"""What a process is given to end by itself once it was asked to."""


class ProcessFailed(HubringError):
    """A child ended with an error; the message shows the end of what it said."""


class Child(ABC):
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


class Process(Child):
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
        super().__init__(name, command, directory)
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def code(self) -> int | None:
        return self._child.poll()

    def ask_to_stop(self) -> None:
        if self.code is None:
            self._child.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL to it alone, as a host that goes down would."""
        self._child.kill()

    def end(self, timeout: float) -> None:
        try:
            self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()


C = TypeVar("C", bound=Child)

Start = Callable[[str, Sequence[str], Path, Mapping[str, str]], Child]
"""Starts a program; the arguments are `Process`'s."""


class Processes:
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
        self.started: list[Child] = []
        self.directory = directory
        self.environment = environment
        self._lifeline = lifeline
        self._start = start
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.started:
            process.ask_to_stop()
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self.started:
            process.end(max(0.0, deadline - time.monotonic()))
            if self._lifeline is not None and process.pid is not None:
                self._lifeline.release(process.pid)

    def start(self, name: str, command: Sequence[str]) -> Child:
        """Starts one more; the arguments are `Process`'s."""
        return self.adopt(self._start(name, command, self.directory, self.environment))

    def adopt(self, process: C) -> C:
        """Takes over a process that was started in another way; returns it."""
        self.started.append(process)
        if self._lifeline is not None and process.pid is not None:
            self._lifeline.hold(process.pid)
        return process

    def running(self) -> list[Child]:
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

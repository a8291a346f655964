"""A child process: started, watched, asked to stop, and ended for certain."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from subprocess import DEVNULL
from typing import IO

log = logging.getLogger(__name__)

GRACE_SECONDS = 15.0
"""How long a child gets to stop by itself; a busy machine takes its time."""

Stream = IO[bytes] | int | None
"""A child's standard input or output, as `subprocess.Popen` has it; None: ours."""


def ending(code: int) -> str:
    """How a process with this return code ended, as a clause."""
    if code >= 0:
        return f"exited with {code}"
    names = [f" ({each.name})" for each in signal.Signals if each == -code]  # real-time signals have none
    return f"was killed by signal {-code}{''.join(names)}"


class Child:
    """One started process. It leads a process group: a Ctrl-C in the terminal is ours to handle.

    Args:
        name: What people call it.
        command: Program and arguments.
        environment: All of its variables; None: ours.
        stdin: With a pipe, an empty line there or its end asks the child to stop, else SIGTERM does.
        stdout: Its standard output.
        stderr: Its standard error.
        session: It leads a session too, and the end of a terminal is not for it.
        pass_fds: Descriptors of ours that it keeps.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        stdin: Stream = DEVNULL,
        stdout: Stream = None,
        stderr: Stream = None,
        session: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.command = tuple(command)
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            process_group=None if session else 0,
            start_new_session=session,
            pass_fds=pass_fds,
        )

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its group."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def ended(self) -> str:
        """How it ended, as a clause; empty while it runs."""
        return "" if self.code is None else ending(self.code)

    @property
    def stdin(self) -> IO[bytes]:
        """Our end of its standard input, where that is a pipe."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """Our end of its standard output, where that is a pipe."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def stderr(self) -> IO[bytes]:
        """Our end of its standard error, where that is a pipe."""
        assert self._process.stderr is not None
        return self._process.stderr

    def signal(self, number: int) -> None:
        """Sends it a signal; nothing happens once it has ended."""
        self._process.send_signal(number)

    def tell(self, line: str) -> None:
        """Writes a line into the pipe."""
        self.stdin.write(f"{line}\n".encode())
        self.stdin.flush()

    def ask_to_stop(self) -> None:
        """Asks it to end by itself."""
        if self._process.stdin is None:
            self.signal(signal.SIGTERM)
        elif not self.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # it has ended already
                # To close the pipe is not enough: a process that we forked may hold its other copy.
                self.stdin.write(b"\n")
                self.stdin.close()

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it ends within so many seconds; None: as long as it takes."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def exit_code(self) -> int:
        """Waits for its end; returns its exit code, or 128+n if signal n ended it, as a shell does."""
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def end(self, seconds: float) -> None:
        """Returns once it has ended; after so many seconds it is killed, with all of its group."""
        if not self.wait(seconds):
            log.warning("%s did not stop: killed", self)
            with contextlib.suppress(ProcessLookupError):  # it ended just now, and another thread saw it
                os.killpg(self.pid, signal.SIGKILL)
            self.wait()

    def stop(self, seconds: float = GRACE_SECONDS) -> None:
        """Asks it to stop, and ends it."""
        self.ask_to_stop()
        self.end(seconds)

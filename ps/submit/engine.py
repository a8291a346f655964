"""The interface of an engine, and how `submit` sends a job to one."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from subprocess import PIPE
from typing import NamedTuple, Protocol

from hubring.ps.core.errors import EngineMissing
from hubring.ps.process.child import Child
from hubring.ps.process.children import passing_on
from hubring.ps.submit.job import Submission

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Engine(Protocol):
    """Renders a job for one engine."""

    @property
    def command(self) -> tuple[str, ...]:
        """The program that reads the output of `render` on standard input, and its arguments."""

    @property
    def fix(self) -> str:
        """What to do if the program is missing."""

    def render(self, job: Submission) -> str:
        """Returns the job in the engine's format, without secrets.

        Raises:
            ConfigError: The format cannot express a setting.
        """

    def secrets(self, job: Submission) -> str:
        """Returns what the engine reads before the job, and a dry run leaves out; often nothing."""


class Answer(NamedTuple):
    """The result of the engine's program: its exit code and the last line that it printed."""

    code: int
    last_line: str


def send(engine: Engine, artefact: str) -> Answer:
    """Runs the engine's program with a rendered job, and copies the program's output to stdout.

    Raises:
        EngineMissing: The program is not on the PATH.
    """
    name, *arguments = engine.command
    program = shutil.which(name)
    if program is None:
        raise EngineMissing(f"there is no {name} on the PATH; {engine.fix}")
    child = Child(name, [program, *arguments], stdin=PIPE, stdout=PIPE)
    with passing_on(SIGNALS, child.signal):
        last_line = _feed(child, artefact)
        return Answer(child.exit_code(), last_line)


def _feed(child: Child, artefact: str) -> str:
    """Writes the job, then copies the program's output; returns the last line that is not empty."""
    # A program that exits without reading explains that with its own output and exit code.
    with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
        pipe.write(artefact.encode())
    last_line = b""
    with child.stdout as lines:
        for line in lines:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            last_line = line.strip() or last_line
    return last_line.decode(errors="replace")

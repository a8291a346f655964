"""What an engine is to `submit`, and how a job is handed to it."""

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
    """An engine."""

    @property
    def command(self) -> tuple[str, ...]:
        """The program that takes what `render` returns on standard input."""

    @property
    def mend(self) -> str:
        """What to do where that program is not there."""

    def render(self, job: Submission) -> str:
        """The job as the engine reads it.

        Raises:
            ConfigError: It cannot be said in the engine's words.
        """


class Answer(NamedTuple):
    """How the engine's program ended: its exit code, and its last line."""

    code: int
    said: str


def hand_over(engine: Engine, artefact: str) -> Answer:
    """Gives the engine's program a rendered job; what it prints goes on to our own output.

    Raises:
        EngineMissing: The program is not there.
    """
    name, *arguments = engine.command
    program = shutil.which(name)
    if program is None:
        raise EngineMissing(f"there is no {name} on the PATH here: {engine.mend}")
    child = Child(name, [program, *arguments], stdin=PIPE, stdout=PIPE)
    with passing_on(SIGNALS, child.signal):
        said = _feed(child, artefact)
        return Answer(child.exit_code(), said)


def _feed(child: Child, artefact: str) -> str:
    """Writes the job, then passes on what the program prints; returns its last line."""
    # A program that ends before it has read tells why by its own words and code.
    with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
        pipe.write(artefact.encode())
    said = b""
    with child.stdout as lines:
        for line in lines:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            said = line.strip() or said
    return said.decode(errors="replace")

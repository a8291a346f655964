"""What an engine is to `submit`, and how a job is handed to it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple, Protocol

from hubring.ps.core.errors import EngineMissing
from hubring.ps.submit.job import Job

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Engine(Protocol):
    """An engine."""

    @property
    def command(self) -> tuple[str, ...]:
        """The program that takes what `render` returns on standard input."""

    @property
    def mend(self) -> str:
        """What to do where that program is not there."""

    def render(self, job: Job) -> str:
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
    process = subprocess.Popen(
        [program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,  # a Ctrl-C in the terminal is ours to pass on, once
    )
    with _passing_on(process):
        said = _feed(process, artefact)
        code = process.wait()
    return Answer(code if code >= 0 else 128 - code, said)


def _feed(process: subprocess.Popen[bytes], artefact: str) -> str:
    """Writes the job, then passes on what the program prints; returns its last line."""
    assert process.stdin is not None
    assert process.stdout is not None
    # A program that ends before it has read tells why by its own words and code.
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(artefact.encode())
    said = b""
    with process.stdout as lines:
        for line in lines:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            said = line.strip() or said
    return said.decode(errors="replace")


@contextlib.contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Signals go to the program, which ends by them in its own way."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

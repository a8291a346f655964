"""What the conductor and its followers say to each other: JSON, one message a frame."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from hubring.workers.compare.run.noise import Sample


class Hello(Struct, frozen=True, kw_only=True, tag=True):
    """A follower's first word."""

    rank: int
    size: int
    local_rank: int
    host: str
    """Its machine's name, or that of its container there."""
    boot: str
    """Equal for all on one machine, whatever they call it: its kernel's boot id, else its name."""
    idle: bool
    """Its machine was at rest."""
    address: str
    """Under which the other machines reach it."""
    cores: tuple[int, ...]
    """Numbers of those that it may use."""
    machine: dict[str, Any]
    """As `hubring.workers.compare.run.machine.describe` has it."""


class Start(Struct, frozen=True, kw_only=True, tag=True):
    """Start a program."""

    name: str
    command: tuple[str, ...]
    directory: str
    """Where its output goes; all machines see it."""
    threads: int
    """PyTorch's."""


class Stop(Struct, frozen=True, kw_only=True, tag=True):
    """Ask a program to end."""

    name: str


class Kill(Struct, frozen=True, kw_only=True, tag=True):
    """End a program with all that it started."""

    name: str


class Listen(Struct, frozen=True, tag=True):
    """A run begins: count what else your machine does."""


class Tell(Struct, frozen=True, tag=True):
    """The run is over: what did you count?"""


class Over(Struct, frozen=True, kw_only=True, tag=True):
    """The comparison has ended, one way or the other."""

    code: int
    """The conductor's exit code, which all tasks end with: a launcher starts those again that failed."""


class Ended(Struct, frozen=True, kw_only=True, tag=True):
    """A program has ended."""

    name: str
    code: int
    """Negative for a signal."""


class Counted(Struct, frozen=True, kw_only=True, tag=True):
    """The answer to `Tell`."""

    sample: Sample


class Failed(Struct, frozen=True, kw_only=True, tag=True):
    """The follower cannot go on; `Ended` follows for the program that it could not start."""

    why: str


Order = Start | Stop | Kill | Listen | Tell | Over
Report = Hello | Ended | Counted | Failed
Message = Order | Report

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Message).decode

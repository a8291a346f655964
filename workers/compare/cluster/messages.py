"""Messages between the conductor and its followers: JSON, one message per frame."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from hubring.workers.compare.run.noise import Sample


class Hello(Struct, frozen=True, kw_only=True, tag=True):
    """A follower's first message."""

    rank: int
    size: int
    local_rank: int
    host: str
    """Hostname of its machine or container."""
    boot: str
    """Equal for all tasks on one machine: the kernel's boot id, else the hostname."""
    idle: bool
    """Its machine was idle."""
    address: str
    """Its address for the other machines."""
    cores: tuple[int, ...]
    """Numbers of the cores that it can use."""
    machine: dict[str, Any]
    """Result of `hubring.workers.compare.run.machine.describe`."""


class Start(Struct, frozen=True, kw_only=True, tag=True):
    """Start a program."""

    name: str
    command: tuple[str, ...]
    directory: str
    """Folder for its output, visible to all machines."""
    threads: int
    """PyTorch threads."""


class Stop(Struct, frozen=True, kw_only=True, tag=True):
    """Send SIGTERM to a program."""

    name: str


class Kill(Struct, frozen=True, kw_only=True, tag=True):
    """Kill a program and all that it started."""

    name: str


class Listen(Struct, frozen=True, tag=True):
    """A run begins: measure noise."""


class Tell(Struct, frozen=True, tag=True):
    """The run is over: send the noise counts."""


class AskTime(Struct, frozen=True, tag=True):
    """Send the time of your clock."""


class Over(Struct, frozen=True, kw_only=True, tag=True):
    """The comparison has ended."""

    code: int
    """Exit code of the conductor. All tasks exit with it, because launchers restart failed tasks."""


class Ended(Struct, frozen=True, kw_only=True, tag=True):
    """A program has ended."""

    name: str
    code: int
    """Negative for a signal."""


class Counted(Struct, frozen=True, kw_only=True, tag=True):
    """The answer to `Tell`."""

    sample: Sample


class Time(Struct, frozen=True, kw_only=True, tag=True):
    """The answer to `AskTime`."""

    ns: int
    """Nanoseconds since 1970."""


class Failed(Struct, frozen=True, kw_only=True, tag=True):
    """The follower cannot start a program; `Ended` for that program follows."""

    why: str


Order = Start | Stop | Kill | Listen | Tell | AskTime | Over
Report = Hello | Ended | Counted | Time | Failed
Message = Order | Report

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Message).decode

"""How a shard process is started: what its parents have in common."""

from __future__ import annotations

import os
from subprocess import PIPE

import msgspec

from hubring.ps.config.kinds import LogFormat
from hubring.ps.process.child import Child
from hubring.ps.process.command import module_command


class Settings(msgspec.Struct, frozen=True):
    """What its parent tells a shard process.

    Attributes:
        control: The coordinator's `HOST:PORT`.
        host: Address to listen on.
        log_format: How its log looks.
        worker: Incarnation of the worker that brings it; 0 where `ps-server` started it.
        parent: The process without which the shard ends.
        device: Where it keeps its parameters: cpu, cuda or cuda:N.
        trace: Folder for a trace of what it does; empty: none.
    """

    control: str
    host: str = "127.0.0.1"
    log_format: LogFormat = "text"
    worker: int = 0
    parent: int = msgspec.field(default_factory=os.getpid)
    device: str = "cpu"
    trace: str = ""


def start(name: str, settings: Settings) -> Child:
    """Starts a shard process. A byte on its standard input, or its end, ends the shard."""
    words = msgspec.json.encode(settings).decode()
    return Child(name, module_command("hubring.ps.shard.process", words), stdin=PIPE)

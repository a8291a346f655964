"""Starts a shard process, for a server or a worker."""

from __future__ import annotations

import os
from subprocess import PIPE

import msgspec

from hubring.ps.config.kinds import LogFormat
from hubring.ps.process.child import Child
from hubring.ps.process.command import module_command


class Settings(msgspec.Struct, frozen=True):
    """The settings that a shard process gets from its parent.

    Attributes:
        control: The coordinator's `HOST:PORT`.
        host: Address to listen on.
        log_format: Format of the log.
        worker: Incarnation of the worker that starts the shard; 0 if `ps-server` starts it.
        parent: Process id; the shard exits when this process exits.
        device: Device of the parameters: cpu, cuda or cuda:N.
        trace: Folder for a trace; empty disables the trace.
    """

    control: str
    host: str = "127.0.0.1"
    log_format: LogFormat = "text"
    worker: int = 0
    parent: int = msgspec.field(default_factory=os.getpid)
    device: str = "cpu"
    trace: str = ""


def start(name: str, settings: Settings) -> Child:
    """Starts a shard process. It exits when its standard input receives a byte or is closed."""
    words = msgspec.json.encode(settings).decode()
    return Child(name, module_command("hubring.ps.shard.process", words), stdin=PIPE)

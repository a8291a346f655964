"""How a shard process is started, and how it ended: what its parents have in common."""

from __future__ import annotations

import os
import sys

import msgspec

from hubring.ps.config.kinds import LogFormat


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


def command(settings: Settings) -> list[str]:
    """Program and arguments. Its standard input must be a pipe: a byte there, or its end, ends the shard."""
    return [sys.executable, "-m", "hubring.ps.shard.process", msgspec.json.encode(settings).decode()]


def ending(code: int) -> str:
    """How a process with this return code ended, as a clause."""
    return f"was killed by signal {-code}" if code < 0 else f"exited with {code}"

"""Starts a shard process, for a server or a worker."""

from __future__ import annotations

import os
from subprocess import DEVNULL, PIPE

import msgspec

from hubring.ps.config.environment import SILENT_GRPC, environment
from hubring.ps.config.kinds import LogFormat
from hubring.ps.process.child import Child
from hubring.ps.process.command import module_command
from hubring.ps.process.stop_signals import held_back
from hubring.ps.security.access import CONNECT_SECONDS, NO_ACCESS, Access
from hubring.ps.security.certificate import Identity


class Settings(msgspec.Struct, frozen=True):
    """The settings that a shard process gets from its parent.

    Attributes:
        control: The coordinator's `HOST:PORT`.
        host: Address to listen on.
        log_format: Format of the log.
        worker: Incarnation of the worker that starts the shard, in hexadecimal; empty if a server starts it.
        parent: Process id; the shard exits when this process exits. 0: it exits with the server, which can
            move to another process.
        device: Device of the parameters: cpu, cuda or cuda:N.
        trace: Folder for a trace; empty disables the trace.
        access: How to reach the coordinator.
        identity: The certificate to listen with; None for a new one.
        authority: Certificates, as PEM, of who signs those of coordinator and workers; empty: they have none.
        patience: Seconds for which the coordinator may be unreachable at the start.
        insecure: Whether to listen without encryption and proof.
        plain_data: Whether ZeroMQ sends gradients without encryption.
        standby: Whether the shard waits to replace another one.
    """

    control: str
    host: str = "127.0.0.1"
    log_format: LogFormat = "text"
    worker: str = ""
    parent: int = msgspec.field(default_factory=os.getpid)
    device: str = "cpu"
    trace: str = ""
    access: Access = NO_ACCESS
    identity: Identity | None = None
    authority: bytes = b""
    patience: float = CONNECT_SECONDS
    insecure: bool = False
    plain_data: bool = False
    standby: bool = False


VARIABLE = "HUBRING_SHARD"
"""Holds the settings: other users can read a process's command line, but not its environment."""


def start(name: str, settings: Settings) -> Child:
    """Starts a shard process.

    With a parent in its settings, it exits when its standard input receives a byte or is closed.
    """
    variables = {**SILENT_GRPC, **environment(), VARIABLE: msgspec.json.encode(settings).decode()}
    stdin = PIPE if settings.parent else DEVNULL
    with held_back():  # the coordinator drains the job, and then requests the exit of its shards
        return Child(name, module_command("hubring.ps.shard.process"), stdin=stdin, environment=variables)

"""Starts a shard process, for a server or, with `--colocate`, for a worker.

A worker's shard is a separate process. As a thread it would wait for the interpreter lock of the training
script, and all other workers would wait with it. The shard must outlive the worker's training, but never the
worker process.
"""

from __future__ import annotations

import os
from subprocess import DEVNULL, PIPE

import msgspec

from hubring.ps.config.environment import SILENT_GRPC, environment
from hubring.ps.config.values import LogFormat, is_loopback
from hubring.ps.core.errors import ConfigError
from hubring.ps.process.child import Child
from hubring.ps.process.launch import module_command, stop_signals_held_back
from hubring.ps.security.access import CONNECT_SECONDS, NO_ACCESS, Access
from hubring.ps.security.certificate import Identity
from hubring.ps.transport.host import towards


class ShardSettings(msgspec.Struct, frozen=True):
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
        authority: PEM certificates of the authority of coordinator and workers; empty: they have none.
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


def start(name: str, settings: ShardSettings) -> Child:
    """Starts a shard process.

    With a parent in its settings, it exits when its standard input receives a byte or is closed.
    """
    variables = {**SILENT_GRPC, **environment(), VARIABLE: msgspec.json.encode(settings).decode()}
    stdin = PIPE if settings.parent else DEVNULL
    with stop_signals_held_back():  # the coordinator drains the job, and then requests the exit of its shards
        return Child(name, module_command("hubring.ps.shard.process"), stdin=stdin, environment=variables)


def shard_host(dialled: str, announced: str) -> str:
    """Returns the address on which this worker's shard listens. All clients of the server must reach it.

    Args:
        dialled: The server's host, as this worker connects to it.
        announced: The server's host in the server's banner.

    Raises:
        ConfigError: The address is beyond loopback, and the server is not.
    """
    # A worker that reaches the server by loopback is on the same host, but other workers may not be.
    here = towards(announced if is_loopback(dialled) else dialled)
    if is_loopback(announced) and not is_loopback(here):
        raise ConfigError(
            f"this worker's shard would listen on {here}, which other hosts can reach, but the server at"
            f" {dialled} listens on {announced} only; restart the server with --host and its host's address"
        )
    return here

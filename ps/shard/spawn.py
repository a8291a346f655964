"""Starts a shard process, for a server or a worker."""

from __future__ import annotations

import os
import signal
from subprocess import PIPE

import msgspec
from msgspec.structs import replace

from hubring.ps.config.environment import SILENT_GRPC, environment
from hubring.ps.config.kinds import LogFormat
from hubring.ps.config.server import ServerConfig
from hubring.ps.core.errors import Fenced
from hubring.ps.process.child import Child
from hubring.ps.process.children import Children
from hubring.ps.process.command import module_command
from hubring.ps.security.access import CONNECT_SECONDS, NO_ACCESS, Access
from hubring.ps.security.certificate import Identity
from hubring.ps.security.own_certificate import Own


class Settings(msgspec.Struct, frozen=True):
    """The settings that a shard process gets from its parent.

    Attributes:
        control: The coordinator's `HOST:PORT`.
        host: Address to listen on.
        log_format: Format of the log.
        worker: Incarnation of the worker that starts the shard, in hexadecimal; empty if a server starts it.
        parent: Process id; the shard exits when this process exits.
        device: Device of the parameters: cpu, cuda or cuda:N.
        trace: Folder for a trace; empty disables the trace.
        access: How to reach the coordinator.
        identity: The certificate to listen with; None for a new one, or for no TLS on loopback.
        authority: Certificates, as PEM, of who signs those of coordinator and workers; empty: they have none.
        patience: Seconds for which the coordinator may be unreachable at the start.
        insecure: Whether to listen beyond loopback without encryption.
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


IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""A terminal or a scheduler signals the whole group. The coordinator drains the job first, and then requests
the exit of its shards."""


def start(name: str, settings: Settings) -> Child:
    """Starts a shard process. It exits when its standard input receives a byte or is closed."""
    variables = {**SILENT_GRPC, **environment(), VARIABLE: msgspec.json.encode(settings).decode()}
    # The child inherits the mask, so a signal waits until the child ignores it: it imports torch for seconds.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        return Child(name, module_command("hubring.ps.shard.process"), stdin=PIPE, environment=variables)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def settings_of(
    control: str, config: ServerConfig, access: Access, own: Own, patience: float = CONNECT_SECONDS
) -> Settings:
    """Returns the settings of this host's shards, which register themselves with the coordinator."""
    return Settings(
        control,
        config.host,
        config.log_format,
        device=config.device,
        trace=str(config.trace or ""),
        access=access,
        identity=own.identity,
        authority=own.authority,
        patience=patience,
        insecure=config.insecure,
        plain_data=config.plain_data,
    )


def start_shards(shards: Children[Child], config: ServerConfig, settings: Settings) -> None:
    """Starts this host's shards and standbys; none if the workers start the shards."""
    for _ in range(0 if config.colocate else config.shards):
        shards.add(start("a shard process", settings))
        if config.standby:
            start_standby(shards, settings)


def start_standby(shards: Children[Child], settings: Settings) -> None:
    """Starts one standby."""
    shards.add(start("a standby process", replace(settings, standby=True)))


def may_be_replaced(ended: Child) -> bool:
    """Returns whether a standby may have taken the place of a shard that ended."""
    return ended.code is not None and (ended.code < 0 or ended.code == Fenced.exit_code)

"""Starts shard processes: those of the server's host, of a host that adds its shards, or of a worker.

With `--colocate`, a worker's shard is a separate process. As a thread it would wait for the interpreter lock
of the training script, and all other workers would wait with it. The shard must outlive the worker's
training, but never the worker process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from functools import partial
from subprocess import DEVNULL, PIPE

import msgspec
from msgspec.structs import replace

from hubring.ps.config.environment import SILENT_GRPC, environment
from hubring.ps.config.server import ServerConfig
from hubring.ps.config.values import LogFormat, is_loopback
from hubring.ps.core.errors import ConfigError, Fenced, JobFailed, ServerUnreachable
from hubring.ps.job.membership import BUSY_SECONDS
from hubring.ps.observe.banner import PLAIN
from hubring.ps.process.child import Adopted, Child, Children, first_ended
from hubring.ps.process.launch import STOP_SIGNALS, module_command, stop_signals_held_back
from hubring.ps.process.restarts import Replacements
from hubring.ps.security.access import CONNECT_SECONDS, NO_ACCESS, Access, find_access
from hubring.ps.security.certificate import Identity, OwnCertificate, load_certificate
from hubring.ps.security.guard import Role
from hubring.ps.transport.host import probe, towards

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
"""Seconds between two looks at the shards."""
_SHARD, _STANDBY = "a shard process", "a standby process"


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


def settings_of(
    control: str,
    config: ServerConfig,
    access: Access,
    own: OwnCertificate,
    patience: float = CONNECT_SECONDS,
    *,
    lives_on: bool = False,
) -> ShardSettings:
    """Returns the settings of this host's shards, which register themselves with the coordinator.

    Args:
        control: The coordinator's `HOST:PORT`.
        config: The server's settings.
        access: How to reach the coordinator.
        own: The certificate of this host's shards.
        patience: Seconds for which the coordinator may be unreachable at the start.
        lives_on: Whether the shards stay when this process ends.
    """
    return ShardSettings(
        control,
        config.host,
        config.log_format,
        parent=0 if lives_on else os.getpid(),
        device=config.device,
        trace=str(config.trace or ""),
        access=access,
        identity=own.identity,
        authority=own.authority,
        patience=patience,
        insecure=config.insecure,
        plain_data=config.plain_data,
    )


def start_shards(
    shards: Children[Child] | Children[Child | Adopted], config: ServerConfig, settings: ShardSettings
) -> None:
    """Starts this host's shards and standbys; none if the workers start the shards."""
    for _ in range(0 if config.colocate else config.shards):
        shards.add(start(_SHARD, settings))
        if config.standby:
            start_standby(shards, settings)


def start_standby(shards: Children[Child] | Children[Child | Adopted], settings: ShardSettings) -> None:
    """Starts one standby."""
    shards.add(start(_STANDBY, replace(settings, standby=True)))


def replacements(
    shards: Children[Child] | Children[Child | Adopted], config: ServerConfig, settings: ShardSettings
) -> Replacements:
    """Returns what starts a standby in the place of each process of this host that ends."""
    wanted = (1 + config.standby) * config.shards if config.standby else 0
    return Replacements(wanted, lambda: start_standby(shards, settings))


def began_as_standby(process: Child | Adopted) -> bool:
    """Returns whether a process was started as a standby; it may be a shard by now."""
    return process.name == _STANDBY


def _may_be_replaced(ended: Child) -> bool:
    """Returns whether a job may go on without a process that ended.

    A standby may have taken the place of a shard. A shard goes on without its standby, unless the standby
    reports the end of the server.
    """
    if ended.code is not None and began_as_standby(ended):
        return ended.code not in (0, ServerUnreachable.exit_code)
    return ended.code is not None and (ended.code < 0 or ended.code == Fenced.exit_code)


async def join(config: ServerConfig) -> int:
    """Runs `ps-server start --join ADDR`: adds this host's shards to a coordinator on another host.

    Returns:
        The exit code: 128 plus the signal's number after a signal, because a job that uses the shards fails.

    Raises:
        JobFailed: A shard was killed by a signal.
        ServerUnreachable: No server answers.
    """
    shards: Children[Child] = Children()
    quit_, signals = asyncio.Event(), list[int]()
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        log.warning("signal %d: this host's shards stop; a job that still uses them fails", number)
        signals.append(number)
        quit_.set()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop, number)
    there = config.join or ""
    began = time.monotonic()
    own = load_certificate(config.tls, serves=True)
    try:
        prove = partial(find_access, insecure=config.insecure, busy_seconds=BUSY_SECONDS)
        access = await asyncio.to_thread(prove, there, Role.SHARD, config.token_file, CONNECT_SECONDS, own)
    except ServerUnreachable as error:
        raise ServerUnreachable(
            f"no server answers at {there} for {time.monotonic() - began:.0f} s: {probe(there)};"
            " check the address, or start the server first"
        ) from error
    left = max(0.0, CONNECT_SECONDS + began - time.monotonic())
    settings = settings_of(there, config, access, own, left)
    start_shards(shards, config, settings)
    missing = replacements(shards, config, settings)
    if config.sends_plain:
        log.warning(PLAIN)
    print(f"{config.shards} shard(s) for {config.join}", file=sys.stderr, flush=True)
    ended: Child | None = None
    while ended is None and not quit_.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(quit_.wait(), LOOK_SECONDS)
        ended = first_ended(shards.started, 0.0)
        if ended is not None and config.standby and _may_be_replaced(ended):
            missing.note(f"{ended} {ended.ended}", ended.process.age)
            shards.started.remove(ended)
            ended = None
        missing.fill(len(shards.started))
    await asyncio.to_thread(shards.end)
    if ended is not None and (ended.code or 0) < 0:
        raise JobFailed(f"{ended} {ended.ended}")
    if ended is not None:
        return ended.exit_code()
    codes = {shard.exit_code() for shard in shards.started}
    return 0 if codes == {0} else 128 + signals[0]  # 0: the server ended them just before the signal

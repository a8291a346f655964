"""`ps-server start`: runs the coordinator and its shard processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection
from msgspec.structs import replace

from hubring.protos.control_pb2_grpc import add_ControlServicer_to_server
from hubring.ps.checkpoint import checkpoint_folder as checkpoints
from hubring.ps.checkpoint.lock import lock
from hubring.ps.config import address_file
from hubring.ps.config.server import ServerConfig
from hubring.ps.coordinator.control_service import Control
from hubring.ps.coordinator.coordinator import Coordinator
from hubring.ps.coordinator.shard_fleet import Shard
from hubring.ps.coordinator.status import ends
from hubring.ps.core.errors import (
    ConfigError,
    HubringError,
    JobFailed,
    NonFinite,
    Preempted,
    ServerUnreachable,
)
from hubring.ps.core.timing import SystemTime
from hubring.ps.core.types import MAX_WORLD_SIZE
from hubring.ps.observe.health import CONTROL, HubHealth
from hubring.ps.page.site import Site
from hubring.ps.process.child import Child
from hubring.ps.process.children import Children, first_ended
from hubring.ps.security.access import CONNECT_SECONDS, NO_ACCESS, Access, find
from hubring.ps.security.certificate import first
from hubring.ps.security.guard import AsyncGuard
from hubring.ps.security.keyring import Keyring
from hubring.ps.security.own_certificate import Own, load
from hubring.ps.security.policy import Role
from hubring.ps.security.token_file import forget
from hubring.ps.shard.spawn import Settings, start
from hubring.ps.store.consistency import by_name
from hubring.ps.transport.grpc.channel import STRANGERS, server_credentials
from hubring.ps.transport.grpc.readable_calls import ReadableCalls
from hubring.ps.transport.host import bracketed, local, numeric, objection, reachable
from hubring.ps.transport.port_probe import probe

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
HELD_UP_SECONDS = 0.5
"""If a tick is later than this, the coordinator extends all leases.

Their holders may have sent heartbeats in time that this process did not read.
"""
_GRPC = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_allowed_incoming_connections", MAX_WORLD_SIZE + 1024),
    ("grpc.max_concurrent_streams", 256),
    *STRANGERS,
)
"""Bounds of the control server. Each worker and each shard has one connection; command lines come and go."""

GOODBYE_SECONDS = 5.0
"""How long shards and workers have to learn that the server stops."""


class Server:
    """One `ps-server start` that runs a coordinator.

    Args:
        config: The server's settings.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._own = load(config.tls, serves=True)
        self._keyring = None if config.insecure else Keyring(config.token_file, self._own.identity)
        self._health = HubHealth()
        self._signals = 0
        self._signal: signal.Signals | None = None
        self._quit = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> tuple[int, dict[str, Any]]:
        """Serves until the server stops.

        Returns:
            The exit code, and the result for the last line of stdout.

        Raises:
            ConfigError: The port is taken, or a file or folder in the settings cannot be used.
            CheckpointCorrupt: No checkpoint in the folder is complete.
        """
        directory = self._config.checkpoint_dir
        if directory is None:
            return await self._serve(None)
        with lock(directory):
            return await self._serve(checkpoints.newest(directory))

    async def _serve(self, restored: tuple[Path, checkpoints.Manifest] | None) -> tuple[int, dict[str, Any]]:
        config = self._config
        consistency = by_name(config.mode, config.staleness, config.backup)
        coordinator = Coordinator(config, consistency, SystemTime(), restored)
        coordinator.fleet.identity = self._own.shown
        server, port = await self._listen(coordinator)
        coordinator.config = replace(config, port=port)  # --port 0 lets the system choose
        address = f"{bracketed(reachable(config.host))}:{port}"
        control = f"{bracketed(local(config.host))}:{port}"
        count = 0 if config.colocate else config.shards
        shards: Children[Child] = Children()
        self._add_signal_handlers(coordinator)
        site: Site | None = None
        opening: asyncio.Task[None] | None = None
        try:
            site = None if config.no_page else Site(config, terminal=sys.stderr.isatty())
            _start_shards(shards, count, control, config, self._shards_access(), self._own)
            self._banner(address, restored, site)
            if site is not None:
                opening = asyncio.create_task(_open(site, coordinator))  # a task, because leases already run
            await self._supervise(coordinator, shards)
            result = self._result(coordinator, address, site)
        finally:
            coordinator.done.set()
            await self._health.tell(coordinator.troubles())
            await asyncio.to_thread(shards.end)
            await coordinator.see_off(self._remote_shards(coordinator, shards), GOODBYE_SECONDS)
            await coordinator.fleet.dismiss(coordinator.fleet.shards)
            if opening is not None:
                await opening
            if site is not None:
                await site.close()
            await server.stop(GOODBYE_SECONDS if coordinator.failure else 0.5)
            if self._keyring is not None:
                self._keyring.withdraw()
        return self._exit_code(coordinator), result

    async def _listen(self, coordinator: Coordinator) -> tuple[grpc.aio.Server, int]:
        keyring = self._keyring
        rejections = coordinator.counters.rejections
        guards = [] if keyring is None else [AsyncGuard(keyring.guard, rejections)]
        server = grpc.aio.server(interceptors=[*guards, ReadableCalls(rejections)], options=_GRPC)
        add_ControlServicer_to_server(Control(coordinator, keyring), server)
        self._health.add_to(server)
        reflection.enable_server_reflection((CONTROL, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        host, port = numeric(self._config.host), self._config.port
        try:
            # Check the port first: gRPC prints an obscure line if it cannot listen.
            if why := objection(host, port):
                raise RuntimeError(why)
            if keyring is not None and port:  # before a client can find the port open
                keyring.publish(port)
            place = f"{bracketed(host)}:{port}"
            if keyring is not None:
                credentials = server_credentials(keyring.identity, self._own.authority)
                port = server.add_secure_port(place, credentials)
            else:
                port = server.add_insecure_port(place)
                forget(port)
        except RuntimeError as error:
            if keyring is not None:
                keyring.withdraw()
            raise ConfigError(
                f"cannot listen on {bracketed(host)}:{port}: {error}; use --port 0 for a free port, or"
                " another --host"
            ) from error
        await self._health.tell(coordinator.troubles())
        if keyring is not None and keyring.path is None:
            keyring.publish(port)
        await server.start()
        return server, port

    def _shards_access(self) -> Access:
        """Returns how this host's shards reach the coordinator."""
        keyring = self._keyring
        if keyring is None:
            return NO_ACCESS
        there = keyring.identity
        return Access(keyring.secret(Role.SHARD), first(there.certificate), there.name, self._own.shown)

    def _add_signal_handlers(self, coordinator: Coordinator) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            loop.add_signal_handler(number, self._on_signal, number, coordinator)

    def _on_signal(self, number: signal.Signals, coordinator: Coordinator) -> None:
        if self._signals and number != signal.SIGINT and number != self._signal:
            return  # SLURM sends its notice first and SIGTERM later; both request the same stop
        self._signals += 1
        self._signal = number
        if self._signals > 1:
            log.warning("%s again: quitting now", number.name)
            self._quit.set()
        else:
            log.warning("%s: %s; signal again to quit now", number.name, self._what_ends(coordinator))
            self._draining = asyncio.create_task(coordinator.drain())

    def _what_ends(self, coordinator: Coordinator) -> str:
        """Returns what a stop waits for. Only a hub that holds parameters writes a checkpoint."""
        if not coordinator.job.started:
            return "the server stops; no job is running"
        saves = coordinator.trains and self._config.checkpoint_dir is not None
        then = ", then the server writes a checkpoint" if saves else ""
        return f"workers finish their step{then}"

    def _banner(
        self, address: str, restored: tuple[Path, checkpoints.Manifest] | None, site: Site | None
    ) -> None:
        config = self._config
        shards = "one per worker, on its host" if config.colocate else str(config.shards)
        if config.await_shards:
            shards += f", and {config.await_shards} on other hosts"
        constant = {"ssp": f" --staleness {config.staleness}", "backup": f" --backup {config.backup}"}
        mode = config.mode + constant.get(config.mode, "")
        count = f"   # x {config.workers} workers" if config.workers > 1 else ""
        lines = [
            f"ps-server on {address}  mode {mode}  shards {shards}",
            f"  workers   ps-worker --server {address}{count}",
            f"  ring      ps-worker --server {address} --topology ring",
            f"  status    ps-server status {address}",
            f"  tokens    {self._tokens()}",
            f"  saves     {self._saves()}",
            *(site.banner() if site is not None else ()),
        ]
        if restored:
            lines.append(f"  resumes   step {restored[1].step} of job {restored[1].job!r} from {restored[0]}")
        print("\n".join(lines), file=sys.stderr, flush=True)
        if config.address_file:
            address_file.write(config.address_file, address)

    def _tokens(self) -> str:
        if self._keyring is None:
            return "none, and no encryption (--insecure): every client can change the model"
        return f"in {self._keyring.path}; workers on other hosts need a copy, in --token-file"

    def _saves(self) -> str:
        config = self._config
        if config.checkpoint_dir is not None:
            return f"every {config.checkpoint_every:g} s to {config.checkpoint_dir}"
        return "nothing: without --checkpoint-dir, a hub that loses this server or a shard loses all steps"

    async def _supervise(self, coordinator: Coordinator, shards: Children[Child]) -> None:
        """Runs until the coordinator is done or a second signal arrives; reports shards that exit."""
        ends = [asyncio.create_task(coordinator.done.wait()), asyncio.create_task(self._quit.wait())]
        due = time.monotonic()
        try:
            while not any(task.done() for task in ends):
                late = time.monotonic() - due
                if late > HELD_UP_SECONDS:
                    coordinator.excuse(late)
                if (shard := first_ended(shards.started, 0.0)) is not None:
                    coordinator.shard_lost(f"{shard} {shard.ended}")
                if self._draining is not None and self._draining.done():
                    self._draining.result()
                await coordinator.tick()
                await self._health.tell(coordinator.troubles())
                due = time.monotonic() + TICK_SECONDS
                await asyncio.wait(ends, timeout=TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ends:
                task.cancel()
            await asyncio.wait(ends)

    @staticmethod
    def _remote_shards(coordinator: Coordinator, shards: Children[Child]) -> list[Shard]:
        """Returns the shards on other hosts. Only the coordinator can notify them that the server stops."""
        own = {(socket.gethostname(), shard.pid) for shard in shards.started}
        return [
            shard
            for shard in coordinator.fleet.shards
            if not shard.worker and (shard.host, shard.pid) not in own
        ]

    def _result(self, coordinator: Coordinator, address: str, site: Site | None) -> dict[str, Any]:
        outcome = coordinator.outcome or coordinator.job.outcome
        return {
            "address": address,
            "page": site.address if site is not None else "",
            "job": coordinator.last_job,
            "mode": self._config.mode,
            "steps": coordinator.last_step,
            **ends(outcome),
            "error": str(self._failure(coordinator) or ""),
            "shards": coordinator.last_stats,
            "checkpoint": str(coordinator.checkpoints.last or ""),
        }

    @staticmethod
    def _failure(coordinator: Coordinator) -> HubringError | None:
        """Returns why the server or its last job failed, or why the last checkpoint was not written."""
        return coordinator.failure or coordinator.job.failure or coordinator.checkpoints.failure

    def _exit_code(self, coordinator: Coordinator) -> int:
        if coordinator.failure is not None:
            return coordinator.failure.exit_code
        failed = self._failure(coordinator)
        if failed is not None and failed is coordinator.checkpoints.failure:
            return failed.exit_code
        if self._config.once and isinstance(failed, NonFinite | ConfigError):
            return failed.exit_code  # a restart does not help
        if self._signal in (signal.SIGTERM, signal.SIGUSR1) and self._signals == 1:
            # 75 requests a restart; a finished job needs none.
            return 0 if self._config.once and coordinator.outcome and coordinator.outcome.ok else 75
        if self._signal is not None:
            return 128 + self._signal
        if self._config.once and coordinator.outcome is not None and not coordinator.outcome.ok:
            if coordinator.outcome.was_preempted:
                return Preempted.exit_code
            return HubringError.exit_code if coordinator.outcome.erred else JobFailed.exit_code
        return 0


def _start_shards(
    shards: Children[Child],
    count: int,
    control: str,
    config: ServerConfig,
    access: Access,
    own: Own,
    patience: float = CONNECT_SECONDS,
) -> None:
    """Starts this host's shards; each registers itself with the coordinator."""
    settings = Settings(
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
    for _ in range(count):
        shards.add(start("a shard process", settings))


async def _open(site: Site, coordinator: Coordinator) -> None:
    try:
        await site.serve(coordinator, coordinator.counters.rejections)
    except Exception:
        log.exception("the status page and /metrics failed to start; the job continues without them")
        await site.close()  # refuses connections instead of letting clients wait


async def join(config: ServerConfig) -> int:
    """Runs `ps-server start --join ADDR`: adds this host's shards to a coordinator on another host.

    Returns:
        The exit code: 128 plus the signal's number after a signal, because a job that uses the shards fails.

    Raises:
        JobFailed: A shard was killed by a signal.
        ServerUnreachable: No server answers.
    """
    shards: Children[Child] = Children()
    quit_, signals = asyncio.Event(), list[signal.Signals]()
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        log.warning("%s: this host's shards stop, and the job fails if it uses them", number.name)
        signals.append(number)
        quit_.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        loop.add_signal_handler(number, stop, number)
    there = config.join or ""
    began = time.monotonic()
    own = load(config.tls, serves=True)
    try:
        access = await asyncio.to_thread(find, there, Role.SHARD, config.token_file, CONNECT_SECONDS, own)
    except ServerUnreachable as error:
        raise ServerUnreachable(
            f"no server answers at {there} for {CONNECT_SECONDS:g} s: {probe(there)} (no TLS handshake);"
            " check the address, or start the server first"
        ) from error
    left = max(0.0, CONNECT_SECONDS + began - time.monotonic())
    _start_shards(shards, config.shards, there, config, access, own, left)
    print(f"{config.shards} shard(s) for {config.join}", file=sys.stderr, flush=True)
    while (ended := first_ended(shards.started, 0.0)) is None and not quit_.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(quit_.wait(), TICK_SECONDS)
    await asyncio.to_thread(shards.end)
    if ended is not None and (ended.code or 0) < 0:
        raise JobFailed(f"{ended} {ended.ended}")
    if ended is None:
        return 128 + signals[0]
    return ended.exit_code()

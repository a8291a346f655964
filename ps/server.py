"""`ps-server start`: runs the coordinator and its shard processes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection
from msgspec.structs import replace

from hubring.protos.control_pb2_grpc import add_ControlServicer_to_server
from hubring.ps.checkpoint import checkpoint_folder as checkpoints
from hubring.ps.checkpoint.checkpoint_folder import lock_directory, with_age
from hubring.ps.config import values
from hubring.ps.config.server import ServerConfig
from hubring.ps.coordinator.control_service import Control, ReadableCalls
from hubring.ps.coordinator.coordinator import Coordinator
from hubring.ps.coordinator.shard_fleet import Fleet, Shard
from hubring.ps.coordinator.status import StatusReporter, ended_ranks
from hubring.ps.core.errors import ConfigError, HubringError, JobFailed, NonFinite, Preempted
from hubring.ps.core.timing import SystemTime
from hubring.ps.observe.banner import PLAIN, banner
from hubring.ps.observe.health import CONTROL, SERVICE, HubHealth
from hubring.ps.page.site import StatusPage
from hubring.ps.process.child import Adopted, Child, Children
from hubring.ps.process.launch import STOP_SIGNALS
from hubring.ps.recovery.coordinator_state import (
    ChildRecord,
    PageRecord,
    ServerRecord,
    ServerState,
    capture,
    restore,
    steps_of,
)
from hubring.ps.recovery.succession import CommitFirst, Succession
from hubring.ps.security import token_file
from hubring.ps.security.access import NO_ACCESS
from hubring.ps.security.certificate import load_certificate
from hubring.ps.security.guard import AsyncGuard
from hubring.ps.security.keyring import Keyring
from hubring.ps.security.token_file import forget
from hubring.ps.shard.host_shards import began_as_standby, replacements, settings_of, start_shards
from hubring.ps.store.consistency import by_name
from hubring.ps.transport.grpc.channel import control_options, server_credentials
from hubring.ps.transport.grpc.newcomers import GrpcNewcomers
from hubring.ps.transport.host import bracketed, local, numeric, objection, reachable

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
HELD_UP_SECONDS = 0.5
"""If a tick is later than this, the coordinator extends all leases.

Their holders may have sent heartbeats in time that this process did not read.
"""

GOODBYE_SECONDS = 8.0
"""How long shards and workers have to learn that the server stops. A worker asks again 4 s after a reply that
was lost."""


class Server:
    """One `ps-server start` that runs a coordinator.

    Args:
        config: The server's settings.
        succession: Where the server goes on if this process is killed; None: nowhere.
    """

    def __init__(self, config: ServerConfig, succession: Succession | None = None) -> None:
        self._succession = succession
        self._inherited = inherited = succession.inherited if succession is not None else None
        self._config = config if inherited is None else replace(config, port=inherited.server.port)
        self._own = load_certificate(config.tls, serves=True)
        kept = inherited.server.keyring if inherited is not None else None
        self._keyring = None if config.insecure else Keyring(config.token_file, self._own.identity, kept)
        self._health = HubHealth()
        self._signals: list[signal.Signals] = []
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
        with lock_directory(directory):
            return await self._serve(checkpoints.newest(directory) if self._inherited is None else None)

    async def _serve(self, restored: tuple[Path, checkpoints.Manifest] | None) -> tuple[int, dict[str, Any]]:
        config = self._config
        consistency = by_name(config.mode, config.staleness, config.backup)
        clock = SystemTime()
        fleet = Fleet(config.lease, self._own.shown)
        coordinator = Coordinator(config, fleet, consistency, clock, restored)
        reporter = StatusReporter(coordinator, clock)
        if self._inherited is None:
            token_file.remove_old_files()
        else:
            restore(coordinator, self._inherited, time.monotonic())
        server, port = await self._listen(coordinator, reporter)
        coordinator.config = replace(coordinator.config, port=port)  # --port 0 lets the system choose
        address = f"{bracketed(reachable(config.host))}:{port}"
        control = f"{bracketed(local(config.host))}:{port}"
        lives_on = self._succession is not None
        access = NO_ACCESS if self._keyring is None else self._keyring.shards_access(port, self._own)
        settings = settings_of(control, config, access, self._own, lives_on=lives_on)
        shards: Children[Child | Adopted] = Children()
        self._missing = replacements(shards, config, settings)
        site: StatusPage | None = None
        opening: asyncio.Task[None] | None = None
        try:
            site = None if config.no_page else self._site()
            if self._inherited is None:
                start_shards(shards, config, settings)
            if self._succession is not None:
                self._succeed(self._succession, coordinator, shards, site)
            else:
                self._add_signal_handlers(coordinator)
            await server.start()
            if self._inherited is None:
                self._announce(address, restored, site)
            if site is not None:
                opening = asyncio.create_task(
                    _open(site, coordinator, reporter)
                )  # a task, because leases already run
            await self._supervise(coordinator, reporter, shards)
            result = self._result(coordinator, address, site)
        finally:
            coordinator.done.set()
            coordinator.fleet.before_call()  # a process that takes over from here on must not miss the shards
            self._health.tell(reporter.troubles())
            await asyncio.to_thread(shards.end)
            await coordinator.wait_until_told(self._remote_shards(coordinator, shards), GOODBYE_SECONDS)
            await coordinator.fleet.dismiss(coordinator.fleet.processes)
            if opening is not None:
                await opening
            if site is not None:
                await site.close()
            await server.stop(GOODBYE_SECONDS if coordinator.failure else 0.5)
            self._newcomers.close()
            if self._keyring is not None:
                self._keyring.withdraw()
        return self._exit_code(coordinator), result

    async def _listen(
        self, coordinator: Coordinator, reporter: StatusReporter
    ) -> tuple[grpc.aio.Server, int]:
        """Returns a server whose port is open but which has not started, and the port."""
        keyring = self._keyring
        rejections = coordinator.counters.rejections
        self._newcomers = GrpcNewcomers(rejections, self._config.members)
        watch = self._newcomers if keyring is not None else None  # it forgets only what it watches
        interceptors: list[grpc.aio.ServerInterceptor] = [ReadableCalls(rejections, watch)]
        if keyring is not None:
            interceptors.insert(0, AsyncGuard(keyring.guard, rejections))
        if self._succession is not None:
            interceptors.append(CommitFirst(self._succession.settle))
        server = grpc.aio.server(interceptors=interceptors, options=control_options(self._config.members))
        add_ControlServicer_to_server(Control(coordinator, reporter, keyring), server)
        add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((CONTROL, SERVICE, reflection.SERVICE_NAME), server)
        host, port = numeric(self._config.host), self._config.port
        # Debian and Ubuntu give the host's own name such an address.
        if values.is_loopback(host) and not values.is_loopback(self._config.host):
            log.warning("no other host reaches %s (%s); give --host an IP address", self._config.host, host)
        try:
            # Check the port first: gRPC prints an obscure line if it cannot listen.
            if why := objection(host, port):
                raise RuntimeError(why)
            if keyring is not None and port:  # before a client can find the port open
                keyring.publish(port)
            place = f"{bracketed(host)}:{port}"
            if keyring is not None:
                credentials = server_credentials(keyring.identity, keyring.guard, self._own.authority)
                port = server.add_secure_port(place, credentials)
                self._newcomers.begin(port)
            else:
                port = server.add_insecure_port(place)
            if keyring is None or self._config.token_file is not None:
                forget(port)
        except RuntimeError as error:
            if keyring is not None:
                keyring.withdraw(failed=True)
            raise ConfigError(
                f"cannot listen on {bracketed(host)}:{port}: {error}; use --port 0 for a free port, or"
                " another --host"
            ) from error
        self._health.tell(reporter.troubles())
        if keyring is not None and keyring.path is None:
            keyring.publish(port, listens=True)
        if keyring is not None and (unix := keyring.unix_socket(port, self._own)):
            server.add_insecure_port(f"unix:{unix}")
        return server, port

    def _site(self) -> StatusPage:
        page = self._inherited.server.page if self._inherited is not None else None
        if page is None:
            return StatusPage(self._config, terminal=sys.stderr.isatty())
        return StatusPage(
            replace(self._config, page_port=page.port), page.token, terminal=sys.stderr.isatty()
        )

    def _add_signal_handlers(self, coordinator: Coordinator) -> None:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number, coordinator)

    def _succeed(
        self,
        succession: Succession,
        coordinator: Coordinator,
        shards: Children[Child | Adopted],
        site: StatusPage | None,
    ) -> None:
        """Goes on where another process was killed, and prepares for the death of this one."""
        inherited = self._inherited
        if inherited is not None:
            for each in inherited.server.shards:
                shards.add(Adopted(each.name, each.process))
        page = None if site is None else PageRecord(site.port, site.token)
        keyring, port = self._keyring, coordinator.config.port

        def state() -> ServerState:
            kept = None if keyring is None else keyring.kept
            own = [ChildRecord(each.name, each.process) for each in shards.started]
            server = ServerRecord(port, list(self._signals), page, kept, own)
            return ServerState(server, capture(coordinator), steps_of(coordinator))

        succession.begin(port, coordinator.fleet, state)
        if inherited is not None:
            for number in inherited.server.signals:
                self._on_signal(signal.Signals(number), coordinator)
            coordinator.take_over(saving=inherited.hub.saving)
        succession.listen(
            lambda number: self._on_signal(signal.Signals(number), coordinator),
            lambda: self._go_on_alone(coordinator),
        )

    def _go_on_alone(self, coordinator: Coordinator) -> None:
        """Ends the server with its job, because the process that a person started was killed."""
        log.warning(
            "the process that started this server was killed; the server goes on until its job ends. To stop"
            " it, run: kill %d",
            os.getpid(),
        )
        coordinator.config = replace(coordinator.config, once=True)
        self._add_signal_handlers(coordinator)

    def _on_signal(self, number: signal.Signals, coordinator: Coordinator) -> None:
        if self._signals and number not in (signal.SIGINT, self._signals[-1]):
            return  # SLURM sends its notice first and SIGTERM later; both request the same stop
        self._signals.append(number)
        coordinator.fleet.before_call()  # a standby knows of the request before a person reads of it
        if len(self._signals) > 1:
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
        return "workers finish their step" + ", then the server writes a checkpoint" * saves

    def _announce(
        self, address: str, restored: tuple[Path, checkpoints.Manifest] | None, site: StatusPage | None
    ) -> None:
        config, resumes = self._config, ""
        if restored:
            resumes = f"step {restored[1].step} of job {restored[1].job!r} from {with_age(restored[0])}"
        tokens = self._keyring.path if self._keyring is not None else None
        page = site.banner() if site is not None else []
        print(banner(config, address, tokens, page, resumes), file=sys.stderr, flush=True)
        if config.sends_plain:
            log.warning(PLAIN)
        if config.address_file:
            values.write_address_file(config.address_file, address)

    async def _supervise(
        self, coordinator: Coordinator, reporter: StatusReporter, shards: Children[Child | Adopted]
    ) -> None:
        """Runs until the coordinator is done or a second signal arrives; reports shards that exit."""
        ends = [asyncio.create_task(coordinator.done.wait()), asyncio.create_task(self._quit.wait())]
        due = time.monotonic()
        try:
            while not (coordinator.done.is_set() or self._quit.is_set()):
                if (late := time.monotonic() - due) > HELD_UP_SECONDS:
                    coordinator.extend_leases(late)
                for shard in [each for each in shards.started if each.ended]:
                    await self._on_ended(coordinator, shards, shard)
                for shard in shards.started:
                    if (socket.gethostname(), shard.pid) in coordinator.fleet.departed:
                        shard.signal(signal.SIGKILL)  # it may be frozen; a standby starts in its place
                if coordinator.failure is None:
                    self._missing.fill(len(shards.started))
                if self._draining is not None and self._draining.done():
                    self._draining.result()
                await coordinator.tick()
                if self._succession is not None:
                    if self._succession.abandoned and coordinator.job.membership is None:
                        coordinator.done.set()
                    self._succession.watch()
                self._health.tell(reporter.troubles())
                due = time.monotonic() + TICK_SECONDS
                await asyncio.wait(ends, timeout=TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ends:
                task.cancel()
            await asyncio.wait(ends)

    async def _on_ended(
        self, coordinator: Coordinator, shards: Children[Child | Adopted], ended: Child | Adopted
    ) -> None:
        """Handles the exit of a shard's process. With `--standby`, a standby starts in its place."""
        if not self._config.standby:
            coordinator.shard_lost(f"{ended} {ended.ended}")
            return
        shards.started.remove(ended)
        standby = began_as_standby(ended)
        await coordinator.standbys.child_ended(ended.pid, str(ended), ended.ended, standby=standby)
        if coordinator.failure is None:
            self._missing.note(f"{ended} {ended.ended}", ended.process.age)

    @staticmethod
    def _remote_shards(coordinator: Coordinator, shards: Children[Child | Adopted]) -> list[Shard]:
        """Returns the shards on other hosts. Only the coordinator can notify them that the server stops."""
        own = {(socket.gethostname(), shard.pid) for shard in shards.started}
        return [
            shard
            for shard in coordinator.fleet.processes
            if not shard.worker and (shard.host, shard.pid) not in own
        ]

    def _result(self, coordinator: Coordinator, address: str, site: StatusPage | None) -> dict[str, Any]:
        return {
            "address": address,
            "page": site.address if site is not None else "",
            "job": coordinator.last_job,
            "mode": "" if coordinator.job.topology == "ring" else self._config.mode,
            "steps": coordinator.last_step,
            **ended_ranks(coordinator.outcome or coordinator.job.outcome),
            "error": str(self._failure(coordinator) or ""),
            "shards": coordinator.last_stats,
            "checkpoint": str(coordinator.checkpoints.last or ""),
            "failovers": coordinator.failovers,
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
        if self._signals in ([signal.SIGTERM], [signal.SIGUSR1]):
            # 75 requests a restart; a finished job needs none.
            return 0 if self._config.once and coordinator.outcome and coordinator.outcome.ok else 75
        if self._signals:
            return 128 + self._signals[-1]
        if self._config.once and coordinator.outcome is not None and not coordinator.outcome.ok:
            if coordinator.outcome.was_preempted:
                return Preempted.exit_code
            return HubringError.exit_code if coordinator.outcome.erred else JobFailed.exit_code
        return 0


async def _open(site: StatusPage, coordinator: Coordinator, reporter: StatusReporter) -> None:
    try:
        await site.serve(coordinator, reporter, coordinator.counters.rejections)
    except Exception:
        log.exception("the status page and /metrics failed to start; the job continues without them")
        await site.close()  # refuses connections instead of letting clients wait

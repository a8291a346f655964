"""A shard process, `python -m hubring.ps.shard.process`: the child of `ps-server start`, or of a worker."""

from __future__ import annotations

import logging
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import msgspec
import torch

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ControlStub
from hubring.ps.core.clock_offset import Offset, measure
from hubring.ps.core.errors import ConfigError, HubringError, ServerUnreachable
from hubring.ps.core.trace import Trace
from hubring.ps.core.types import PROTOCOL
from hubring.ps.observe import logs
from hubring.ps.shard import gpu
from hubring.ps.shard.control_service import ShardControl
from hubring.ps.shard.loop import ShardLoop
from hubring.ps.shard.spawn import Settings
from hubring.ps.store.consistency import by_name
from hubring.ps.store.parameter_memory import HostMemory, ParameterMemory
from hubring.ps.transport.grpc.channel import open_channel
from hubring.ps.transport.port_probe import probe
from hubring.ps.transport.registry import host_id, open_doors

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
"""How long a shard looks for its coordinator."""
SILENT_SECONDS = 4.0
"""How long the hub may be silent, however short the lease: one that was held up comes back."""


class Registration:
    """This shard's tie to the coordinator: registers, then keeps the lease."""

    def __init__(
        self, settings: Settings, host_id: str, addresses: dict[str, str], orphaned: threading.Event
    ) -> None:
        self.failure: HubringError | None = None
        """Why the shard ends, where nobody told it to."""
        self._orphaned = orphaned
        self._control = settings.control
        self._stub = ControlStub(open_channel(settings.control))
        self._token = secrets.token_hex(16)
        request = pb.RegisterShardRequest(
            protocol=PROTOCOL,
            host=socket.gethostname(),
            pid=os.getpid(),
            host_id=host_id,
            addresses=addresses,
            token=self._token,
            worker=settings.worker,
        )
        self._reply = self._register(request)
        self.index = self._reply.shard
        rule = by_name(self._reply.mode, self._reply.staleness, self._reply.backup)
        self.consistency = replace(rule, finite=not self._reply.allow_nonfinite)

    def _register(self, request: pb.RegisterShardRequest) -> pb.RegisterShardReply:
        heard, told = time.monotonic(), False
        while not self._orphaned.wait(0.2):
            try:
                reply = self._stub.RegisterShard(request, timeout=CONNECT_SECONDS)
            except grpc.RpcError as error:
                if time.monotonic() - heard > CONNECT_SECONDS:
                    raise ServerUnreachable(
                        f"no hub answers at {self._control} for {CONNECT_SECONDS:g} s: {probe(self._control)}"
                        f" ({error.code().name}: {error.details()}); check the address, or start it first"
                    ) from error
                if not told:
                    log.info("no hub at %s yet; looking for %g s", self._control, CONNECT_SECONDS)
                told = True
                continue
            if reply.refused:
                raise ConfigError(reply.refused)
            if reply.lease_seconds > 0:
                return reply
            log.info("a job is running; this shard joins when it is over")
            self._orphaned.wait(2.0)
            heard = time.monotonic()
        raise SystemExit  # the process that started this shard is gone, and nothing is held yet

    def clock_offset(self) -> Offset:
        """How far the coordinator's clock is ahead of this host's.

        Raises:
            ServerUnreachable: It does not answer any more.
        """
        try:
            return measure(lambda: self._stub.Clock(pb.ClockRequest(), timeout=CONNECT_SECONDS).time_ns)
        except grpc.RpcError as error:
            raise ServerUnreachable(
                f"the hub at {self._control} went away ({error.code().name}: {error.details()});"
                " start it again"
            ) from error

    def keep(self, lost: Callable[[], None]) -> None:
        """Renews the lease in a thread; calls `lost` once coordinator or parent are gone, or it says stop."""
        threading.Thread(target=self._beat, args=(lost,), name="heartbeat", daemon=True).start()

    def _beat(self, lost: Callable[[], None]) -> None:
        lease, patience = self._reply.lease_seconds, max(self._reply.lease_seconds, SILENT_SECONDS)
        request = pb.ShardHeartbeatRequest(token=self._token)
        heard = time.monotonic()
        while time.monotonic() - heard < patience:
            try:
                if self._stub.ShardHeartbeat(request, timeout=patience).stop:
                    break
                heard = time.monotonic()
            except grpc.RpcError as error:
                log.debug("the coordinator does not answer: %s", error.code().name)
            if self._orphaned.wait(min(1.0, lease / 5)):
                break
        else:
            self.failure = ServerUnreachable(
                f"the hub at {self._control} has not answered for {patience:g} s: it was killed, stopped or"
                " cut off. Start it again with the same --checkpoint-dir, then its shards and the workers"
            )
        lost()


def main(argument: str) -> None:
    """Runs one shard until the coordinator or the parent process is gone."""
    settings = msgspec.json.decode(argument, type=Settings)
    # torch's fused optimizers wake their thread pool however small the slice, and on a host that
    # the workers keep busy that costs milliseconds. More cores are used by more shards.
    torch.set_num_threads(1)
    place = logs.configure(settings.log_format)
    place.role = "shard"
    orphaned = threading.Event()
    watched = (settings.parent, orphaned)
    threading.Thread(target=_watch_parent, args=watched, name="parent", daemon=True).start()
    control = ShardControl()
    doors = open_doors(settings.host, register=[control.add_to])
    addresses = {name: listener.address for name, listener in doors.listeners.items()}
    memory: ParameterMemory = HostMemory(doors.allocate)
    if settings.device != "cpu":
        room = gpu.room(settings.device)
        memory = room.parameters
        addresses |= room.addresses
    registration = Registration(settings, host_id(), addresses, orphaned)
    place.role = f"shard{registration.index}"
    trace = None
    if settings.trace:
        trace = Trace(Path(settings.trace), place.role, registration.clock_offset())
    loop = ShardLoop(registration.consistency, list(doors.listeners.values()), memory, trace)
    control.serve(loop, registration.index)
    registration.keep(loop.stop)
    loop.run()
    if registration.failure is not None:
        raise registration.failure


def _watch_parent(parent: int, orphaned: threading.Event) -> None:
    """Our parent holds the other end of our standard input: when that says a word or ends, so do we.

    A worker's forked children hold that end too and may outlive it, so we look at the parent itself as well.
    """
    alive = os.pidfd_open(os.getppid())
    if os.getppid() == parent:  # else it ended before we looked, and somebody else took us in
        select.select([sys.stdin.fileno(), alive], [], [])
    orphaned.set()


if __name__ == "__main__":
    # A terminal or a scheduler signals the whole group; the coordinator drains, and tells us when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        main(sys.argv[1])
    except HubringError as error:
        log.error("%s", error)
        raise SystemExit(error.exit_code) from error

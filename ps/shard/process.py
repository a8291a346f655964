"""A shard process, `python -m hubring.ps.shard.process`: a child of `ps-server start` or of a worker."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import msgspec
import torch

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ControlStub
from hubring.ps.config.environment import environment
from hubring.ps.config.values import is_loopback
from hubring.ps.core import bounds
from hubring.ps.core.bounds import Rejections, clean_message
from hubring.ps.core.counters import usage
from hubring.ps.core.errors import (
    RESTART_ALL,
    RESTART_JOB,
    ConfigError,
    Fenced,
    HubringError,
    ServerUnreachable,
)
from hubring.ps.core.timing import ClockOffset, Pauses, measure_offset
from hubring.ps.core.trace import Trace
from hubring.ps.core.types import PROTOCOL
from hubring.ps.job.membership import BUSY_SECONDS, RETRY_SECONDS, answer_seconds, heartbeat_seconds
from hubring.ps.observe import logs
from hubring.ps.process import launch
from hubring.ps.process.launch import await_parent_end, kill_siblings
from hubring.ps.security.access import CONNECT_SECONDS, ShardLock, refused_error
from hubring.ps.security.certificate import make_certificate
from hubring.ps.shard.control_service import ShardControl
from hubring.ps.shard.host_shards import VARIABLE, ShardSettings
from hubring.ps.shard.loop import ShardLoop
from hubring.ps.shard.standby import Follower, StandbyLink, StandbyVerdict
from hubring.ps.store.consistency import by_name
from hubring.ps.store.parameter_memory import GpuMemory, HostMemory, ParameterMemory
from hubring.ps.transport.grpc.calls import (
    InsistentCalls,
    OpenCall,
    describe,
    details,
    patience,
    whole,
)
from hubring.ps.transport.grpc.channel import FAST_REDIAL, open_channel
from hubring.ps.transport.host import host_id, probe
from hubring.ps.transport.polling import sleep_as_batch
from hubring.ps.transport.registry import open_doors

log = logging.getLogger(__name__)

STOPPED = 128 + signal.SIGTERM
"""Exit code of a shard that its parent stops. One that the server lets go exits with 0."""


class Registration:
    """Registers this shard with the coordinator, and renews its lease."""

    def __init__(
        self,
        settings: ShardSettings,
        host_id: str,
        addresses: dict[str, str],
        lock: ShardLock,
        orphaned: threading.Event,
    ) -> None:
        self.failure: HubringError | None = None
        """Why the shard exits without a request to exit."""
        self.exit_code = STOPPED
        """The exit code without a failure."""
        self._orphaned = orphaned
        self._heartbeats = InsistentCalls()
        self._control, self._patience, self._parent = settings.control, settings.patience, settings.parent
        self._stub = ControlStub(open_channel(settings.control, settings.access, FAST_REDIAL))
        self._token = lock.token
        request = pb.RegisterShardRequest(
            protocol=PROTOCOL,
            host=socket.gethostname(),
            pid=os.getpid(),
            host_id=host_id,
            addresses=addresses,
            token=self._token,
            worker=bytes.fromhex(settings.worker),
            door=lock.key.to_proto(),
            standby=settings.standby,
        )
        self._presence = OpenCall(lambda: self._stub.Connect(pb.ConnectRequest(token=self._token)))
        self._reply = self._register(request)
        self.index = self._reply.shard
        rule = by_name(self._reply.mode, self._reply.staleness, self._reply.backup)
        self.consistency = replace(rule, finite=not self._reply.allow_nonfinite)

    def _register(self, request: pb.RegisterShardRequest) -> pb.RegisterShardReply:
        heard, logged = time.monotonic(), False
        while not self._orphaned.wait(0.2):
            self._presence.keep()
            try:
                reply = whole(self._stub.RegisterShard(request, timeout=CONNECT_SECONDS))
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    raise refused_error(self._control, details(error)) from error
                if time.monotonic() - heard > patience(error, BUSY_SECONDS, self._patience):
                    raise ServerUnreachable(
                        f"no server answers at {self._control} for {time.monotonic() - heard:.0f} s:"
                        f" {probe(self._control)} ({describe(error)});"
                        " check the address, or start the server first"
                    ) from error
                if not logged:
                    log.info("no server at %s yet; trying again", self._control)
                logged = True
                continue
            if reply.refused:
                raise ConfigError(clean_message(reply.refused))
            if reply.lease_seconds > 0:
                return reply
            log.info("a job is running; this shard joins after the job")
            self._orphaned.wait(2.0)
            heard = time.monotonic()
        raise SystemExit(STOPPED)  # by the parent process; the shard holds no parameters yet

    def clock_offset(self) -> ClockOffset:
        """Measures how far the coordinator's clock is ahead of this host's clock.

        Raises:
            ServerUnreachable: The coordinator does not answer.
        """
        try:
            return measure_offset(
                lambda: whole(self._stub.Clock(pb.ClockRequest(), timeout=CONNECT_SECONDS)).time_ns
            )
        except grpc.RpcError as error:
            raise ServerUnreachable(
                f"the server at {self._control} stopped answering ({describe(error)}); restart the server"
            ) from error

    def ask(self, stream: bytes, unreachable: bool) -> StandbyVerdict:
        """Asks what becomes of the standby to which a stream leads.

        Args:
            stream: The stream's secret.
            unreachable: Whether this shard cannot reach the standby any more, and wants to give it up.
        """
        request = pb.ShardHeartbeatRequest(token=self._token, stream=stream, unreachable=unreachable)
        again, timeout = answer_seconds(self._reply.lease_seconds), self._reply.silent_seconds
        try:
            reply = InsistentCalls().make(self._stub.ShardHeartbeat, request, again, timeout)
        except grpc.RpcError as error:
            log.debug("the coordinator does not answer: %s", error.code().name)
            return StandbyVerdict.WAIT
        if reply.stop:
            self.dismissed(reply.dismissed)
            return StandbyVerdict.STOP
        return StandbyVerdict.ALONE if reply.given_up else StandbyVerdict.WAIT

    def dismissed(self, why: str) -> None:
        """Notes that the job goes on without this process; `why` is empty if the server ends."""
        self.exit_code = 0
        if why and self.failure is None:
            self.failure = Fenced(why)
            self._orphaned.set()

    def keep(self, loop: ShardLoop) -> None:
        """Renews the lease in a thread.

        It stops the loop once the coordinator requests the exit, or the coordinator or the parent is gone.
        """
        threading.Thread(target=self._beat, args=(loop,), name="heartbeat", daemon=True).start()
        threading.Thread(target=self._end_heartbeats, name="orphan", daemon=True).start()

    def _end_heartbeats(self) -> None:
        """Ends the heartbeat that waits for an answer, once this process is not needed any more."""
        self._orphaned.wait()
        self._heartbeats.end()

    def _beat(self, loop: ShardLoop) -> None:
        lease, silent_seconds = self._reply.lease_seconds, self._reply.silent_seconds
        again, timeout = answer_seconds(lease), max(lease, silent_seconds)
        heard, allowed, pauses = time.monotonic(), timeout, Pauses()
        while time.monotonic() - heard - pauses.seconds < allowed:
            self._presence.keep()
            secret, stalled = loop.stream
            request = pb.ShardHeartbeatRequest(token=self._token, stream=secret, stalled=stalled)
            try:
                with pauses.within(timeout):
                    reply = self._heartbeats.make(self._stub.ShardHeartbeat, request, again, timeout)
                if reply.stop:
                    self.dismissed(reply.dismissed)
                    break
                if reply.given_up:
                    loop.command(partial(loop.leave_standby, secret))
                kill_siblings(reply.departed, self._parent)  # only then does the parent start a standby
                heard, pause = time.monotonic(), RETRY_SECONDS if stalled else heartbeat_seconds(lease)
                pauses.clear()
            except grpc.RpcError as error:
                log.debug("the coordinator does not answer: %s", error.code().name)
                allowed, pause = patience(error, lease, silent_seconds), RETRY_SECONDS
            with pauses.within(pause):
                orphaned = self._orphaned.wait(pause)
            if orphaned:
                break
        else:
            self.failure = ServerUnreachable(
                f"the server at {self._control} has not answered for {allowed:g} s (it was killed, suspended"
                f" or disconnected). {RESTART_ALL}"
            )
        silent = time.monotonic() - heard
        if self.failure is None and silent - pauses.seconds <= lease < silent:
            self.failure = Fenced(
                f"this shard was suspended for about {pauses.seconds:.0f} s. The server at {self._control}"
                f" had no heartbeat within the lease of {lease:g} s and has given up the shard, so its part"
                f" of the parameters is lost. {RESTART_JOB}. To allow longer pauses, use a longer --lease"
            )
        self._presence.close()
        loop.stop()


def main() -> None:
    """Runs one shard until the coordinator requests the exit, or the coordinator or the parent is gone."""
    settings = msgspec.json.decode(environment()[VARIABLE], type=ShardSettings)
    # torch's fused optimizers wake their thread pool even for a small slice. On a host with busy
    # workers that costs milliseconds. Start more shards to use more cores.
    torch.set_num_threads(1)
    place = logs.configure(settings.log_format)
    place.role = "shard"
    bounds.raise_descriptor_limit()
    usage()  # keeps open what it reads, before connections can take all descriptors
    orphaned = threading.Event()
    if settings.parent:
        watched = (settings.parent, orphaned)
        threading.Thread(target=_watch_parent, args=watched, name="parent", daemon=True).start()
    control, rejections = ShardControl(), Rejections()
    # On loopback too, a shard must prove itself: when it dies, any program of this host can take its port.
    lock = ShardLock(
        identity=settings.identity or (None if settings.insecure else make_certificate()),
        authority=settings.authority,
        plain_data=settings.plain_data or is_loopback(settings.host),
    )
    doors = open_doors(settings.host, [control.add_to], rejections, lock)
    addresses = {name: listener.address for name, listener in doors.listeners.items()}
    memory: ParameterMemory = HostMemory(doors.allocate)
    if settings.device != "cpu":
        memory = GpuMemory.on(settings.device)
        addresses |= memory.invitation()
    registration = Registration(settings, host_id(), addresses, lock, orphaned)
    place.role = "standby" if settings.standby else f"shard{registration.index}"
    trace = None
    if settings.trace:
        trace = Trace(Path(settings.trace), place.role, registration.clock_offset())
    loop = ShardLoop(registration.consistency, list(doors.listeners.values()), memory, trace, rejections)
    if settings.standby:
        loop.follow(None, Follower(loop, None, registration.index).answer)
    standby_link = StandbyLink(registration.ask, registration.dismissed, settings.access.identity)
    control.serve(loop, registration.index, standby_link)
    registration.keep(loop)
    sleep_as_batch()
    gc.freeze()  # as a worker does: workers/run_script.py
    loop.run()
    if registration.failure is not None:
        raise registration.failure
    raise SystemExit(registration.exit_code)


def _watch_parent(parent: int, orphaned: threading.Event) -> None:
    """Waits until the parent writes to or closes this process's standard input, or exits.

    A worker's forked children inherit the other end of the pipe and may outlive the worker, so the pipe
    alone is not enough.
    """
    await_parent_end(parent, sys.stdin.fileno())
    orphaned.set()


if __name__ == "__main__":
    launch.leave_signals_to_parent()
    try:
        main()
    except HubringError as error:
        log.error("%s", error)
        raise SystemExit(error.exit_code) from error

"""A worker's membership in a job: join, lease, leave.

The control plane always uses gRPC. One thread renews the lease and reads the server's news: a lost member,
a failed job, a lost server. `on_failure` passes a failure to the threads that wait for data.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ControlStub
from hubring.ps.client.join import Admission, join_request, prove
from hubring.ps.client.rendezvous import Board, KeptStates, ShardLocations
from hubring.ps.client.server_calls import MemberCalls, Silence, WorkerDeparture
from hubring.ps.config.values import LogFormat
from hubring.ps.core.bounds import MESSAGE_CHARACTERS, clean, clean_message
from hubring.ps.core.errors import (
    BY_EXIT_CODE,
    ConfigError,
    Fenced,
    HubringError,
    JobFailed,
)
from hubring.ps.core.timing import ClockOffset, Waiting, measure_offset, wait_message
from hubring.ps.core.types import BucketSpec, Sender, ShardPlan, Slicing, incarnation_from_wire
from hubring.ps.job.control_messages import bucket_to_proto, slice_from_proto
from hubring.ps.job.membership import RETRY_SECONDS, SILENT_SECONDS, answer_seconds, heartbeat_seconds
from hubring.ps.job.outcome import LeaveReason
from hubring.ps.job.telemetry import Telemetry, TelemetryExporter
from hubring.ps.security.certificate import NO_CERTIFICATE, OwnCertificate
from hubring.ps.transport.grpc.calls import InsistentCalls, OpenCall
from hubring.ps.transport.grpc.channel import FAST_REDIAL, open_channel


@dataclass(frozen=True, slots=True)
class Assignment:
    """The coordinator's answer to this worker's buckets."""

    plan: ShardPlan
    step: int
    initialised: bool
    undecided: bool = False
    """There is no plan yet: the workers must measure which slice size is fastest."""


log = logging.getLogger(__name__)

FAST_HEARTBEAT_SECONDS = 0.1
"""Seconds between heartbeats while the workers agree on the step to stop after."""
BLOCKED_SECONDS = 1.0
"""A worker that has waited this long for others is blocked, maybe by one that waits for its state."""


class Session:
    """One worker's membership in one job, with the shard that it starts if the hub wants one.

    Args:
        address: The server's `HOST:PORT`.
        job: Name of the script or built-in job.
        topology: `hub` or `ring`.
        rank: The worker's rank; None to let the server choose.
        world_size: Number of workers; None to use the server's setting.
        start_timeout: Seconds to wait for the other workers.
        token_file: File with the server's tokens; None for that of this user's server on this host.
        own: This worker's certificate, and the authority of the server's.
        insecure: Whether to join a server that asks for no tokens and encrypts nothing.
        log_format: Log format of the shard that this worker starts.
        trace: Folder for that shard's trace; empty for no trace.
        min_workers: Members with which a ring continues after a loss; 0: it does not continue.
        local: Whether the workers of a host exchange among themselves first.

    Raises:
        ServerUnreachable: No server answers at `address` within 10 seconds.
        ConfigError: The server refuses this worker. The message gives the reason and the fix.
    """

    def __init__(
        self,
        address: str,
        *,
        job: str,
        topology: str,
        rank: int | None = None,
        world_size: int | None = None,
        start_timeout: float = 300.0,
        token_file: Path | None = None,
        own: OwnCertificate = NO_CERTIFICATE,
        insecure: bool = False,
        log_format: LogFormat = "text",
        trace: str = "",
        min_workers: int = 0,
        local: bool = False,
    ) -> None:
        self.address, self.host = address, socket.gethostname()
        self.step = 0
        self.loss = float("nan")
        self.telemetry: Callable[[], Telemetry] = Telemetry  # the heartbeat's thread calls it
        self._exporter = TelemetryExporter()
        self.waiting = Waiting()
        """Entered by the training thread while it waits for other workers."""
        self.stopping = False
        """This worker was asked to stop, and all workers stop with it.

        `communicator.draining` turns true in the step after which they stop.
        """
        self.draining = False
        """The server asks a ring to stop."""
        self.stop_after = 0
        """The step after which a ring stops; 0 if this worker knows of none."""
        self._stop_agreed = threading.Event()
        self._stop_heard = threading.Event()
        self.failure: HubringError | None = None
        self.on_ring: Callable[[int, bool], None] = lambda *_: None
        """Called by the heartbeat's thread with the generation of a ring that must end, and whether workers
        wait to enter."""
        self._on_failure: list[Callable[[HubringError], None]] = []
        self._failing = threading.Lock()
        """Guards `failure` and `_on_failure`, so that each callback is called once."""
        self._finished = ""  # the error if this worker takes another step, because another worker finished
        self._explained = threading.Event()  # set once `verdict` has an answer
        self._left = threading.Event()
        self._departure: WorkerDeparture | None = None
        began = time.monotonic()
        access = prove(address, token_file, own, insecure=insecure)
        self._channel = open_channel(address, access, FAST_REDIAL)
        self._stub = ControlStub(self._channel)
        request = join_request(self.host, job, topology, rank, world_size, min_workers, local)
        self._presence = OpenCall(lambda: self._stub.Connect(pb.ConnectRequest(token=request.token)))
        self._admission = Admission(
            address, self._stub, access, own, log_format, trace, began, self._presence
        )
        self._heartbeats = InsistentCalls()
        self._thread = threading.Thread(target=self._keep_alive, name="heartbeat", daemon=True)
        try:
            joined = self._admission.join(request, start_timeout)
        except BaseException:
            self.close()
            raise
        self.sender = Sender(joined.rank, incarnation_from_wire(joined.incarnation))
        self.size, self.ring_size = joined.world_size, joined.ring_size
        self.late, self.neighbours = joined.late, joined.neighbours
        self.mode, self.saves, self.lockstep = joined.mode, joined.saves, joined.lockstep
        self._lease, self._silent = joined.lease_seconds, joined.silent_seconds
        self._silence = Silence(address, self._lease, self._silent)
        self._calls = MemberCalls(
            self._stub, joined.rank, joined.incarnation, self._silence, lambda: self.failure
        )
        self.locations = ShardLocations(self._calls, joined.shards, own.shown)
        self.shards = self.locations.shards
        self.board = Board(self._calls, patience=max(10.0, self._lease))
        self.states = KeptStates(self._calls)
        self._thread.start()

    # The lease.

    def on_failure(self, callback: Callable[[HubringError], None]) -> None:
        """Calls `callback(error)` when this worker cannot continue.

        The heartbeat thread calls it. If this worker has failed already, this method calls it.
        """
        with self._failing:
            self._on_failure.append(callback)
            failure = self.failure
        if failure is not None:
            callback(failure)

    def verdict(self) -> HubringError | None:
        """Returns the server's error for a loss that this worker noticed first, or None if it reports none.

        A broken connection shows at once that a peer is lost. The server knows that the peer finished, or
        which one it is when its lease expires, which is soon after its connection closed.
        """
        patience = self._lease + SILENT_SECONDS
        if self.failure is None:
            log.warning("a peer is lost; waiting until the server names it, at most %.0f s", patience)
        self._explained.wait(patience)
        return self.failure or (ConfigError(self._finished) if self._finished else None)

    def stop_ring(self, after: int) -> None:
        """Makes all members of a ring stop after step `after`, and waits until all of them know it.

        `after` must be a step that no member can have completed.

        Raises:
            HubringError: This worker cannot continue.
        """
        self.stop_after = self.stop_after or after
        self._await(self._stop_agreed)

    def stop_hub(self) -> None:
        """Makes all workers of a hub stop after a common step: the next one if all wait for this worker.

        Raises:
            HubringError: This worker cannot continue.
        """
        self.stopping = True
        self._await(self._stop_heard)

    def _await(self, event: threading.Event) -> None:
        while not event.wait(FAST_HEARTBEAT_SECONDS):
            if self.failure is not None:
                raise self.failure

    def _keep_alive(self) -> None:
        interval, again = heartbeat_seconds(self._lease), answer_seconds(self._lease)
        pause, silence = interval, self._silence
        while not self._leaves(pause):
            self._presence.keep()
            beat = self._beat()
            try:
                with silence.pauses.within(silence.timeout):
                    reply = self._heartbeats.make(self._stub.Heartbeat, beat, again, silence.timeout)
            except grpc.RpcError as error:
                pause = RETRY_SECONDS
                lost = silence.meaning(error)
                if lost is not None and not self._left.is_set():
                    self._fail(lost)
                    return
            else:
                pause = interval
                silence.end()
                if beat.stopping:
                    self._stop_heard.set()
                if (reply.fenced and self._left.is_set()) or not self._handle(reply):
                    return

    def _leaves(self, interval: float) -> bool:
        """Waits for the time of the next heartbeat; returns whether this worker leaves."""
        # Other workers wait while all agree on the step to stop after.
        seconds = FAST_HEARTBEAT_SECONDS if self.stop_after or self.stopping else interval
        with self._silence.pauses.within(seconds):
            return self._left.wait(seconds)

    def _beat(self) -> pb.HeartbeatRequest:
        return pb.HeartbeatRequest(
            **self._calls.member,
            step=self.step,
            loss=self.loss,
            waiting=self.waiting.seconds,
            stopping=self.stopping,
            shard_ended=self._admission.shard.ended if self._admission.shard else "",
            stop_after=self.stop_after,
            telemetry=self._exporter.export(self.telemetry),
        )

    def _handle(self, reply: pb.HeartbeatReply) -> bool:
        """Handles a heartbeat's reply. Returns False if this worker cannot continue."""
        for line in reply.news:
            log.warning("%s", clean(line, MESSAGE_CHARACTERS))
        if reply.draining and not self.draining:
            log.warning("the server asked all workers to stop")
            self.draining = True
        self.waiting.slowest = clean(reply.slowest, MESSAGE_CHARACTERS)
        seconds = self.waiting.due()
        if seconds is not None:
            log.warning("%s", wait_message(seconds, self.step, self.waiting.slowest))
        self.stop_after = reply.stop_after or self.stop_after
        self.locations.note(reply.failovers)
        if reply.keep:
            self.states.ask(shared=reply.keep_shared, blocked=self.waiting.seconds > BLOCKED_SECONDS)
        self._finished = clean_message(reply.finished)
        self.on_ring(reply.broken, reply.newcomers)
        if reply.finished:
            self._explained.set()
        if reply.stop_agreed:
            self._stop_agreed.set()
        if reply.fenced or reply.failed:
            kind = Fenced if reply.fenced else BY_EXIT_CODE.get(reply.exit_code, JobFailed)
            self._fail(kind(clean_message(reply.failed)))
        return self.failure is None

    def _fail(self, error: HubringError) -> None:
        with self._failing:
            self.failure, callbacks = error, tuple(self._on_failure)
        self._explained.set()
        for callback in callbacks:
            callback(error)

    # The job.

    def plan(
        self, buckets: Sequence[BucketSpec], slicing: Slicing | None = None, *, trial: int = 0
    ) -> Assignment:
        """Sends this worker's buckets and returns the shards that hold their slices.

        Args:
            buckets: In the order of their indices.
            slicing: How to cut them, once the workers have measured it; None to use the server's setting.
            trial: The number of a measurement, from 1, whose slices the server discards afterwards; 0: none.
                The answer's `step` is the number of measurements that the other workers began after it.

        Raises:
            ConfigError: The job, or the hub's checkpoint, has another model. Names the first difference.
            JobFailed: A shard cannot take its part.
        """
        slice_bytes, shards = slicing or (0, 0)
        request = pb.PlanRequest(
            **self._calls.member,
            buckets=[bucket_to_proto(bucket) for bucket in buckets],
            slice_bytes=slice_bytes,
            shards=shards,
            trial=trial,
            step=self.step,
        )
        reply = self._calls.make(self._stub.Plan, request, max(60.0, self._lease))
        if reply.refused:
            raise BY_EXIT_CODE.get(reply.exit_code, ConfigError)(clean_message(reply.refused))
        plan = ShardPlan(tuple(slice_from_proto(piece) for piece in reply.slices))
        return Assignment(plan, reply.step, reply.initialised, reply.undecided)

    def clock_offset(self) -> ClockOffset:
        """Measures how far the coordinator's clock is ahead of this host's."""
        ask = partial(self._calls.make, self._stub.Clock, pb.ClockRequest(), 10.0)
        return measure_offset(lambda: ask().time_ns)

    @property
    def serves(self) -> bool:
        """Whether this worker started a shard. The other workers lose it if this worker exits first."""
        return self._admission.shard is not None

    def leave(self, reason: LeaveReason, text: str = "") -> None:
        """Leaves the job.

        Raises:
            ServerUnreachable: This worker finished, but the server did not acknowledge it.
        """
        if self._left.is_set():
            return
        self._left.set()
        request = pb.LeaveRequest(
            **self._calls.member,
            reason=pb.LeaveRequest.Reason.Value(reason.name),
            text=text,
            step=self.step,
        )
        times = self._lease, self._silent
        self._departure = WorkerDeparture(self.address, self._stub, request, *times, self._admission.shard)
        self._departure.leave(insists=self.failure is None)

    def await_end(self) -> None:
        """Waits until the job is over; call it after `leave`. See `WorkerDeparture.await_end`."""
        if self._departure is not None:
            self._departure.await_end()

    def close(self) -> None:
        """Stops this worker's shard and its heartbeat, and closes the channel to the server."""
        self._left.set()
        self._heartbeats.end()
        if self._admission.shard is not None:
            self._admission.shard.stop()
        if self._thread.is_alive():
            self._thread.join()
        self._presence.close()
        self._channel.close()

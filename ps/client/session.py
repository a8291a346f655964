"""A worker's place in the job: joined, kept by heartbeats, left.

Control always goes by gRPC. One thread renews the lease and brings the news:
a member lost, the job failed, the server gone. Whoever waits for data learns of
it through `on_failure`, so that nobody waits for ever.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ControlStub
from hubring.ps.client.join import BY_EXIT_CODE, Admission, sentence_of
from hubring.ps.config.kinds import LogFormat
from hubring.ps.core.clock_offset import Offset, measure
from hubring.ps.core.errors import (
    ConfigError,
    DeadlineExceeded,
    Fenced,
    HubringError,
    JobFailed,
    ServerUnreachable,
)
from hubring.ps.core.types import PROTOCOL, BucketSpec, Sender, ShardPlan, Slicing
from hubring.ps.core.waiting import Waiting, sentence
from hubring.ps.job.job import Reason
from hubring.ps.job.membership import heartbeat_seconds
from hubring.ps.job.plan_protos import bucket_to_proto, slice_from_proto
from hubring.ps.shard.colocated import outlast
from hubring.ps.transport.grpc.channel import open_channel
from hubring.ps.transport.registry import ShardAddress

log = logging.getLogger(__name__)

_T = TypeVar("_T")

HURRY_SECONDS = 0.1
"""How often a worker tells and hears while all agree on the step to stop after."""

SILENT_SECONDS = 4.0
"""How long a server that is gone may take to come back. One that is there and does not answer has a lease."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the coordinator answered to this worker's buckets."""

    plan: ShardPlan
    step: int
    initialised: bool
    undecided: bool = False
    """There is no plan yet: the workers are to find out which size of slices suits them."""


class Session:
    """One worker's membership in one job, with the shard beside it if the hub wants one.

    Args:
        address: The server's `HOST:PORT`.
        job: Name of the script or built-in job.
        topology: `hub` or `ring`.
        rank: None where the server may choose.
        world_size: None where the server says it.
        start_timeout: Seconds to wait for the others.
        log_format: How the log of such a shard looks.
        trace: Folder for a trace of what such a shard does; empty: none.

    Raises:
        ServerUnreachable: Nothing answers at `address` within 10 seconds.
        ConfigError: The server refuses this worker; the text says why and the mend.
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
        log_format: LogFormat = "text",
        trace: str = "",
    ) -> None:
        self.address = address
        self.host = socket.gethostname()
        self.step = 0
        self.loss = float("nan")
        self.waiting = Waiting()
        """Entered by the training thread for as long as it waits for others."""
        self.stopping = False
        """This worker was asked to stop, and all stop with it; `communicator.draining` will tell when."""
        self.draining = False
        """The server asks a ring to stop."""
        self.stop_after = 0
        """The step after which a ring stops; 0: none that this worker knows of."""
        self._stop_agreed = threading.Event()
        self._stop_heard = threading.Event()
        self.failure: HubringError | None = None
        self._on_failure: list[Callable[[HubringError], None]] = []
        self._failed = threading.Event()
        self._left = threading.Event()
        self._channel = open_channel(address)
        self._stub = ControlStub(self._channel)
        self._admission = Admission(address, self._stub, log_format, trace)
        request = pb.JoinRequest(
            protocol=PROTOCOL,
            token=secrets.token_hex(16),
            job=job,
            topology=topology,
            rank=-1 if rank is None else rank,
            world_size=world_size or 0,
            host=self.host,
            pid=os.getpid(),
        )
        try:
            joined = self._admission.join(request, start_timeout)
        except BaseException:
            self.close()
            raise
        self.sender = Sender(joined.rank, joined.incarnation)
        self.size = joined.world_size
        self.late = joined.late
        self.neighbours = joined.neighbours
        self.mode = joined.mode
        self.lockstep = joined.lockstep
        self.shards = [ShardAddress(shard.host_id, dict(shard.addresses)) for shard in joined.shards]
        self._lease = joined.lease_seconds
        self._thread = threading.Thread(target=self._keep_alive, name="heartbeat", daemon=True)
        self._thread.start()

    # The lease.

    def on_failure(self, callback: Callable[[HubringError], None]) -> None:
        """Calls `callback(error)`, in the heartbeat's thread, when this worker cannot go on."""
        self._on_failure.append(callback)
        if self.failure is not None:
            callback(self.failure)

    def verdict(self) -> HubringError | None:
        """What the server has to say of a loss that this worker noticed first; None if nothing.

        A broken line tells at once that somebody is gone, but the server only
        knows who when that worker's lease has run out.
        """
        patience = self._lease + SILENT_SECONDS
        if self.failure is None:
            log.warning("asking the server what happened; it knows within %.0f s", patience)
        self._failed.wait(patience)
        return self.failure

    def stop_ring(self, after: int) -> None:
        """Lets all members of a ring stop after a step that none can have completed; waits until all know.

        Raises:
            HubringError: This worker cannot go on anyway.
        """
        self.stop_after = self.stop_after or after
        self._await(self._stop_agreed)

    def stop_hub(self) -> None:
        """Lets all workers of a hub stop after a common step: the next one, where all wait for this worker.

        Raises:
            HubringError: This worker cannot go on anyway.
        """
        self.stopping = True
        self._await(self._stop_heard)

    def _await(self, event: threading.Event) -> None:
        while not event.wait(HURRY_SECONDS):
            if self.failure is not None:
                raise self.failure

    def _keep_alive(self) -> None:
        interval = heartbeat_seconds(self._lease)
        patience = max(self._lease, SILENT_SECONDS)
        heard = time.monotonic()
        # Some wait while all agree on their end.
        while not self._left.wait(HURRY_SECONDS if self.stop_after or self.stopping else interval):
            beat = self._beat()
            try:
                reply = self._stub.Heartbeat(beat, timeout=patience)
            except grpc.RpcError as error:
                silent = time.monotonic() - heard
                held_up = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                if silent > (patience if held_up else SILENT_SECONDS) and not self._left.is_set():
                    self._fail(
                        ServerUnreachable(
                            f"the server at {self.address} has not answered for {silent:.1f} s"
                            f" ({sentence_of(error)}); it was stopped or the network is cut."
                            " Start it again with the same --checkpoint-dir, then the workers"
                        )
                    )
                    return
            else:
                heard = time.monotonic()
                if beat.stopping:
                    self._stop_heard.set()
                if not self._digest(reply):
                    return
                self._tell_wait(reply.slowest)

    def _beat(self) -> pb.HeartbeatRequest:
        rank, incarnation = self.sender
        return pb.HeartbeatRequest(
            rank=rank,
            incarnation=incarnation,
            step=self.step,
            loss=self.loss,
            waiting=self.waiting.seconds,
            stopping=self.stopping,
            shard_ended=self._admission.shard.ended if self._admission.shard else "",
            stop_after=self.stop_after,
        )

    def _tell_wait(self, slowest: str) -> None:
        """Whoever waits for long is told for whom."""
        seconds = self.waiting.due()
        if seconds is not None:
            log.warning("%s", sentence(seconds, self.step, slowest))

    def _digest(self, reply: pb.HeartbeatReply) -> bool:
        """Takes the news in; False when this worker cannot go on."""
        for line in reply.news:
            log.warning("%s", line)
        if reply.draining and not self.draining:
            log.warning("all workers are asked to stop")
            self.draining = True
        self.stop_after = reply.stop_after or self.stop_after
        if reply.stop_agreed:
            self._stop_agreed.set()
        if reply.fenced:
            self._fail(Fenced(reply.failed))
        elif reply.failed:
            self._fail(BY_EXIT_CODE.get(reply.exit_code, JobFailed)(reply.failed))
        return self.failure is None

    def _fail(self, error: HubringError) -> None:
        self.failure = error
        self._failed.set()
        for callback in self._on_failure:
            callback(error)

    # The job.

    def plan(
        self, buckets: Sequence[BucketSpec], slicing: Slicing | None = None, *, trial: bool = False
    ) -> Assignment:
        """Hands in this worker's buckets and learns where their slices live.

        Args:
            buckets: In the order of their indices.
            slicing: How to cut them, where the server leaves that to the workers and they have found out.
            trial: These slices are to be tried out, and forgotten.

        Raises:
            ConfigError: The job, or the hub's checkpoint, holds another model; names the first difference.
            JobFailed: A shard cannot take its part.
        """
        rank, incarnation = self.sender
        slice_bytes, shards = slicing or (0, 0)
        request = pb.PlanRequest(
            rank=rank,
            incarnation=incarnation,
            buckets=[bucket_to_proto(bucket) for bucket in buckets],
            slice_bytes=slice_bytes,
            shards=shards,
            trial=trial,
        )
        reply = self._call(lambda: self._stub.Plan(request, timeout=60.0))
        if reply.refused:
            raise BY_EXIT_CODE.get(reply.exit_code, ConfigError)(reply.refused)
        plan = ShardPlan(tuple(slice_from_proto(piece) for piece in reply.slices))
        return Assignment(plan, reply.step, reply.initialised, reply.undecided)

    def publish(self, key: str, value: str) -> None:
        """Pins `value` under `key` for the other workers to find."""
        self._rendezvous(key, value, 0.0)

    def lookup(self, key: str, timeout: float) -> str:
        """The value that some worker published under `key`, waiting for it.

        Raises:
            DeadlineExceeded: Nobody did within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0 and self.failure is None:
            value = self._rendezvous(key, "", min(left, 2.0))
            if value:
                return value
        raise self.failure or DeadlineExceeded(f"nobody published {key!r} within {timeout:g} s")

    def _rendezvous(self, key: str, value: str, wait: float) -> str:
        rank, incarnation = self.sender
        request = pb.RendezvousRequest(
            rank=rank, incarnation=incarnation, key=key, value=value, wait_seconds=wait
        )
        return self._call(lambda: self._stub.Rendezvous(request, timeout=wait + 10.0)).value

    def clock_offset(self) -> Offset:
        """How far the coordinator's clock is ahead of this host's."""

        def ask() -> int:
            return self._stub.Clock(pb.ClockRequest(), timeout=10.0).time_ns

        return self._call(lambda: measure(ask))

    @property
    def serves(self) -> bool:
        """Whether this worker brought a shard, which the others lose if it leaves before them."""
        return self._admission.shard is not None

    def leave(self, reason: Reason, text: str = "") -> None:
        """Gives the place back. A server that is gone by now is not missed."""
        if self._left.is_set():
            return
        self._left.set()
        self._thread.join()
        rank, incarnation = self.sender
        self._goodbye = pb.LeaveRequest(
            rank=rank,
            incarnation=incarnation,
            reason=pb.LeaveRequest.Reason.Value(reason.name),
            text=text,
            step=self.step,
        )
        self._say_goodbye()

    def close(self) -> None:
        """Ends this worker's shard, as late as the others need it, and the line to the server.

        That may be long after `leave`, where nobody waits for the slowest; the
        log says who it is. A server that is gone lets nobody go on, so then it is at once.
        """
        try:
            if self._left.is_set() and self._admission.shard is not None:
                self._goodbye.wait_seconds = 2.0
                outlast(self._admission.shard, self._say_goodbye)
        finally:
            if self._admission.shard is not None:
                self._admission.shard.stop()
            self._channel.close()

    def _say_goodbye(self) -> str:
        """Tells the server; returns who needs this worker's shard still."""
        try:
            reply = self._stub.Leave(self._goodbye, timeout=self._goodbye.wait_seconds + 2.0)
        except grpc.RpcError as error:
            log.debug("the server did not hear that we left: %s", sentence_of(error))
            return ""
        for line in reply.news:
            log.warning("%s", line)
        return reply.needed_by

    def _call(self, call: Callable[[], _T]) -> _T:
        """Makes one call; the server being gone, or this worker fenced, is raised as such."""
        try:
            return call()
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.PERMISSION_DENIED:
                raise Fenced(str(error.details())) from error
            raise self.failure or ServerUnreachable(
                f"the server at {self.address} went away ({sentence_of(error)})"
            ) from error

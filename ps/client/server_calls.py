"""A worker's calls to a server that may be silent or replaced meanwhile, and how it leaves its job.

Law: every call of a worker may be repeated. A join is known by its token, a departure by its incarnation. A
plan or a value that the server has already is the same again. A measurement is planned once for all workers.

Law of silence: a server that ended refuses calls, and is given some seconds, in which a standby may take
over. A server that is stopped lets calls time out, and is given at least the lease, because it recovers.
Pauses of this process do not count.

Law of departure: a worker that finished succeeds only once the server has acknowledged that it left, and has
reported that the job is over and its last checkpoint is written. The worker repeats its request until then,
and confirms the report. The server waits for that. Leaving twice changes nothing, so a reply that was lost
does no harm.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ControlStub
from hubring.ps.core.bounds import MESSAGE_CHARACTERS, clean, clean_message
from hubring.ps.core.errors import (
    BY_EXIT_CODE,
    RESTART_ALL,
    Fenced,
    HubringError,
    JobFailed,
    ServerUnreachable,
)
from hubring.ps.core.timing import LOG_WAIT_EVERY, Pauses, SystemTime, TimeSource
from hubring.ps.process.child import Child
from hubring.ps.transport.grpc.calls import describe, patience, whole

RETRY_SECONDS = 0.1
"""Seconds between two attempts."""


class Silence:
    """The time since a server's last reply.

    Args:
        address: The server's address, for messages.
        lease_seconds: The worker's lease.
        silent_seconds: How long the server may refuse connections.
        clock: The source of the time.

    Attributes:
        pauses: Encloses the waits of the thread that calls the server.
        refusing: See `silent_seconds`.
    """

    def __init__(
        self, address: str, lease_seconds: float, silent_seconds: float, clock: TimeSource | None = None
    ) -> None:
        self._clock = clock or SystemTime()
        self.pauses = Pauses(self._clock)
        self._address = address
        self._lease = lease_seconds
        self.refusing = silent_seconds
        self._heard = self._clock.now()

    @property
    def timeout(self) -> float:
        """How long one call may take, in seconds."""
        return max(self._lease, self.refusing)

    def end(self) -> None:
        """Notes a reply."""
        self._heard = self._clock.now()
        self.pauses.clear()

    def meaning(self, error: grpc.RpcError) -> HubringError | None:
        """Returns why this worker cannot continue after a call that failed; None if it can call again."""
        patient = self._silent() <= patience(error, self._lease, self.refusing)
        return None if patient else self.gone(error)

    def gone(self, error: grpc.RpcError) -> HubringError:
        """Returns why this worker cannot continue, if the server does not come back after this call."""
        paused = self.pauses.seconds
        if paused > self._lease:
            return Fenced(
                f"this worker was suspended for about {paused:.0f} s, longer than its lease of"
                f" {self._lease:g} s, and the server at {self._address} has gone since ({describe(error)})."
                " The job went on without this worker, and is over; the server's last line shows how it ended"
            )
        return ServerUnreachable(
            f"the server at {self._address} has not answered for {self._silent():.1f} s ({describe(error)})."
            f" The server stopped or the network is down. {RESTART_ALL}"
        )

    def _silent(self) -> float:
        return self._clock.now() - self._heard - self.pauses.seconds


class MemberCalls:
    """A worker's calls to its server, each made again while the server is out of reach.

    Args:
        stub: The gRPC stub of the server.
        rank: The worker's rank.
        incarnation: Its incarnation, as on the wire.
        silence: How long the server may refuse connections, and what that means.
        failure: Returns why the worker cannot continue; None if it can.

    Attributes:
        member: The fields of a request by which the server knows the worker.
    """

    def __init__(
        self,
        stub: ControlStub,
        rank: int,
        incarnation: bytes,
        silence: Silence,
        failure: Callable[[], HubringError | None],
    ) -> None:
        self.stub, self.failure = stub, failure
        self.member: dict[str, Any] = {"rank": rank, "incarnation": incarnation}
        self._silence = silence

    def make(self, method: Callable[..., Any], request: object, timeout: float) -> Any:
        """Calls a method of the stub; `timeout` is for each attempt.

        Raises:
            Fenced: This worker lost its place.
            HubringError: This worker cannot continue, or the server is gone.
        """
        began = time.monotonic()
        while True:
            try:
                return whole(method(request, timeout=timeout))
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.PERMISSION_DENIED:
                    raise Fenced(clean_message(error.details() or "")) from error
                out_of_reach = error.code() is grpc.StatusCode.UNAVAILABLE
                too_late = time.monotonic() > began + self._silence.refusing
                if (failure := self.failure()) or not out_of_reach or too_late:
                    raise failure or self._silence.gone(error) from error
            time.sleep(RETRY_SECONDS)


log = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0
"""How long one request waits for its reply, beyond the time that the server may hold it."""
HOLD_SECONDS = 2.0
"""How long the server may hold a request of a worker that waits for the end of the job."""
LEAVE_RETRY_SECONDS = 0.2


@dataclass(slots=True, repr=False)  # the request has the worker's incarnation
class WorkerDeparture:
    """The departure of one worker.

    Attributes:
        address: The server's address, for messages.
        stub: The gRPC stub of the server.
        request: The request to leave.
        lease_seconds: The worker's lease.
        silent_seconds: How long the server may refuse connections.
        shard: The shard that this worker started, if any.
    """

    address: str
    stub: ControlStub
    request: pb.LeaveRequest
    lease_seconds: float
    silent_seconds: float
    shard: Child | None
    _over: bool = field(default=False, init=False)
    """Whether the server is gone."""

    @property
    def _finished(self) -> bool:
        return self.request.reason == pb.LeaveRequest.FINISHED

    def leave(self, *, insists: bool) -> None:
        """Leaves the job, and logs the worker's last news.

        Args:
            insists: Whether to repeat a request that failed.

        Raises:
            ServerUnreachable: This worker finished, but the server did not acknowledge in time that it left.
        """
        try:
            self._send(insists=insists)
        except ServerUnreachable as error:
            if self._finished:
                raise
            log.warning("%s", error)
            self._over = True

    def await_end(self) -> None:
        """Waits until the job is over, if this worker finished or runs a shard that other workers need.

        Raises:
            HubringError: This worker finished, but its job failed or has no last checkpoint, or the server
                did not report how it ended.
        """
        if self._over or not (self._finished or self.shard is not None):
            return
        try:
            self._await_end()
        except HubringError:
            if self._finished:
                raise

    def _await_end(self) -> None:
        self.request.wait_seconds = HOLD_SECONDS
        logged = -math.inf
        while (reply := self._send(insists=True)).awaits:
            if self.shard is not None and self.shard.ended:
                raise JobFailed(f"{self.shard} {self.shard.ended}, before the job was over")
            if time.monotonic() - logged > LOG_WAIT_EVERY:
                what = f"{self.shard} still serves" if self.shard is not None else "waiting for"
                log.info("training has finished; %s %s", what, reply.awaits)
                logged = time.monotonic()
        self._confirm()
        if reply.failed:
            raise BY_EXIT_CODE.get(reply.exit_code, JobFailed)(reply.failed)

    def _confirm(self) -> None:
        """Lets the server go; without this it waits some seconds for the worker to ask again."""
        self.request.heard = True
        try:
            self.stub.Leave(self.request, timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            log.debug(
                "the server did not get this worker's confirmation of the job's end: %s", describe(error)
            )

    def _send(self, *, insists: bool) -> pb.LeaveReply:
        began, logged = time.monotonic(), False
        while True:
            try:
                seconds = self.request.wait_seconds + ANSWER_SECONDS
                reply = whole(self.stub.Leave(self.request, timeout=seconds))
            except grpc.RpcError as error:
                silent = time.monotonic() - began
                if not insists or silent > patience(error, self.lease_seconds, self.silent_seconds):
                    raise ServerUnreachable(
                        f"this worker left its job, but the server at {self.address} has not answered for"
                        f" {silent:.1f} s ({describe(error)}): the job may have failed, and its last"
                        " checkpoint may be missing. See the server's log, and restart a job that failed"
                    ) from error
                if not logged:
                    log.warning("the server does not answer this worker, which leaves; asking again")
                logged = True
                time.sleep(LEAVE_RETRY_SECONDS)
            else:
                for line in reply.news:
                    log.warning("%s", clean(line, MESSAGE_CHARACTERS))
                reply.awaits, reply.failed = (
                    clean(reply.awaits, MESSAGE_CHARACTERS),
                    clean_message(reply.failed),
                )
                return reply

"""How a worker leaves its job, and learns how the job ended.

Law: a worker that finished succeeds only once the server has acknowledged that it left, and has reported that
the job is over and its last checkpoint is written. The worker repeats its request until then, and confirms
the report. The server waits for that. Leaving twice changes nothing, so a reply that was lost does no harm.
"""

from __future__ import annotations

import logging
import math
import time

import grpc

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ControlStub
from hubring.ps.core.errors import BY_EXIT_CODE, HubringError, JobFailed, ServerUnreachable
from hubring.ps.core.peer_text import MESSAGE, clean, clean_message
from hubring.ps.core.waiting import LOG_EVERY
from hubring.ps.process.child import Child
from hubring.ps.transport.grpc.call_error import describe, patience, whole

log = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0
"""How long one request waits for its reply, beyond the time that the server may hold it."""
HOLD_SECONDS = 2.0
"""How long the server may hold a request of a worker that waits for the end of the job."""
RETRY_SECONDS = 0.2


class Departure:
    """The departure of one worker.

    Args:
        address: The server's address, for messages.
        stub: The gRPC stub of the server.
        request: The request to leave.
        lease_seconds: The worker's lease.
        silent_seconds: How long the server may refuse connections.
        shard: The shard that this worker started, if any.
    """

    def __init__(
        self,
        address: str,
        stub: ControlStub,
        request: pb.LeaveRequest,
        lease_seconds: float,
        silent_seconds: float,
        shard: Child | None,
    ) -> None:
        self._address = address
        self._stub = stub
        self._request = request
        self._lease, self._silent = lease_seconds, silent_seconds
        self._shard = shard
        self._finished = request.reason == pb.LeaveRequest.FINISHED
        self._over = False
        """Whether the server is gone."""

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
        if self._over or not (self._finished or self._shard is not None):
            return
        try:
            self._await_end()
        except HubringError:
            if self._finished:
                raise

    def _await_end(self) -> None:
        self._request.wait_seconds = HOLD_SECONDS
        logged = -math.inf
        while (reply := self._send(insists=True)).awaits:
            if self._shard is not None and self._shard.ended:
                raise JobFailed(f"{self._shard} {self._shard.ended}, before the job was over")
            if time.monotonic() - logged > LOG_EVERY:
                what = f"{self._shard} still serves" if self._shard is not None else "waiting for"
                log.info("training has finished; %s %s", what, reply.awaits)
                logged = time.monotonic()
        self._confirm()
        if reply.failed:
            raise BY_EXIT_CODE.get(reply.exit_code, JobFailed)(reply.failed)

    def _confirm(self) -> None:
        """Lets the server go; without this it waits some seconds for the worker to ask again."""
        self._request.heard = True
        try:
            self._stub.Leave(self._request, timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            log.debug("the server did not hear that this worker knows how its job ended: %s", describe(error))

    def _send(self, *, insists: bool) -> pb.LeaveReply:
        began, logged = time.monotonic(), False
        while True:
            try:
                seconds = self._request.wait_seconds + ANSWER_SECONDS
                reply = whole(self._stub.Leave(self._request, timeout=seconds))
            except grpc.RpcError as error:
                silent = time.monotonic() - began
                if not insists or silent > patience(error, self._lease, self._silent):
                    raise ServerUnreachable(
                        f"this worker left its job, but the server at {self._address} has not answered for"
                        f" {silent:.1f} s ({describe(error)}): the job may have failed, and its last"
                        " checkpoint may be missing. See the server's log, and restart a job that failed"
                    ) from error
                if not logged:
                    log.warning("the server does not answer this worker, which leaves; asking again")
                logged = True
                time.sleep(RETRY_SECONDS)
            else:
                for line in reply.news:
                    log.warning("%s", clean(line, MESSAGE))
                reply.awaits, reply.failed = clean(reply.awaits, MESSAGE), clean_message(reply.failed)
                return reply

"""How a worker joins its job: it connects to the server, starts a shard if the hub asks, and waits.

Law: the worker retries until the server answers, then asks again until all workers have joined.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ControlStub
from hubring.ps.config.values import LogFormat, is_loopback
from hubring.ps.config.values import address as split
from hubring.ps.core.bounds import clean_message
from hubring.ps.core.errors import (
    BY_EXIT_CODE,
    ConfigError,
    DeadlineExceeded,
    JobFailed,
    ServerUnreachable,
)
from hubring.ps.core.types import PROTOCOL
from hubring.ps.job.membership import BUSY_SECONDS, SILENT_SECONDS
from hubring.ps.process.child import Child
from hubring.ps.security.access import CONNECT_SECONDS, Access, find_access, refused_error
from hubring.ps.security.certificate import NO_CERTIFICATE, OwnCertificate, load_certificate
from hubring.ps.security.guard import Role
from hubring.ps.shard.host_shards import ShardSettings, shard_host, start
from hubring.ps.transport.grpc.calls import OpenCall, describe, details, patience, whole
from hubring.ps.transport.host import probe, start_command

log = logging.getLogger(__name__)


def prove(address: str, token_file: Path | None, own: OwnCertificate, *, insecure: bool) -> Access:
    """Returns a worker's access to a server that has proved itself.

    Args:
        address: The server's `HOST:PORT`.
        token_file: File with the server's tokens; None for that of this user's server on this host.
        own: This worker's certificate, and the authority of the server's.
        insecure: Whether to join a server that proves nothing.

    Raises:
        ServerUnreachable: No server answers.
        ConfigError: The server is another one, or the worker has no token for it.
    """
    began, find = time.monotonic(), partial(find_access, insecure=insecure, busy_seconds=BUSY_SECONDS)
    try:
        return find(address, Role.WORKER, token_file, CONNECT_SECONDS, own)
    except ServerUnreachable as error:
        raise _silent(address, began) from error


def join_request(
    host: str,
    job: str,
    topology: str,
    rank: int | None,
    world_size: int | None,
    min_workers: int,
    local: bool,
) -> pb.JoinRequest:
    """Returns the request of this process, which the server knows again by its token."""
    return pb.JoinRequest(
        protocol=PROTOCOL,
        token=secrets.token_hex(16),
        job=job,
        topology=topology,
        rank=-1 if rank is None else rank,
        world_size=world_size or 0,
        host=host,
        pid=os.getpid(),
        min_workers=min_workers,
        local=local,
    )


@dataclass(slots=True)
class Admission:
    """Asks the server to let a worker join.

    Attributes:
        address: The server's `HOST:PORT`.
        stub: The gRPC stub of the server.
        access: What the stub's channel was opened with.
        own: The worker's certificate, with which its shard listens.
        log_format: Log format of the shard that the worker starts.
        trace: Folder for that shard's trace; empty for no trace.
        began: When the worker began to look for the server, by `time.monotonic`.
        presence: The call that shows the server that this worker lives.
        shard: The shard process that this worker started; None if the hub wants none.
        silent_seconds: How long the server may refuse connections.
    """

    address: str
    stub: ControlStub
    access: Access
    own: OwnCertificate
    log_format: LogFormat
    trace: str
    began: float
    presence: OpenCall
    shard: Child | None = None
    silent_seconds: float = SILENT_SECONDS

    def join(self, request: pb.JoinRequest, start_timeout: float) -> pb.JoinReply:
        """Returns the worker's place once all workers have joined, within `start_timeout` seconds.

        Raises:
            ServerUnreachable: No server answers, or the server stopped.
            DeadlineExceeded: Some workers did not join in time.
            JobFailed: The worker's shard has exited.
            HubringError: The server refuses this worker. The message gives the reason.
        """
        began = time.monotonic()
        reply = self._ask(request)
        while reply.state in (pb.JoinReply.WAITING, pb.JoinReply.BRING_SHARD):
            self.silent_seconds = reply.silent_seconds
            waited = time.monotonic() - began
            if reply.state == pb.JoinReply.BRING_SHARD:
                self._bring_shard(reply)
                request.brings_shard = True
            else:
                log.info("waited %.0f s: %s", waited, reply.text)
            self._check_start(reply, waited, start_timeout)
            reply = self._ask(request, again=True)
        if reply.state == pb.JoinReply.REFUSED:
            raise BY_EXIT_CODE.get(reply.exit_code, ConfigError)(reply.text)
        return reply

    def _bring_shard(self, reply: pb.JoinReply) -> None:
        host = shard_host(split(self.address)[0], reply.server_host)
        own = load_certificate(self.own.files, serves=True) if self.own.identity else NO_CERTIFICATE
        settings = ShardSettings(
            self.address,
            host,
            self.log_format,
            reply.incarnation.hex(),
            trace=self.trace,
            access=self.access._replace(secret=reply.shard_secret),
            identity=own.identity,
            authority=own.authority,
            insecure=reply.insecure,
            plain_data=reply.plain_data,
        )
        self.shard = start("this worker's shard", settings)
        log.info("the hub runs its shards on the workers' hosts; this worker starts one on %s", host)
        if reply.plain_data and not (reply.insecure or is_loopback(host)):
            log.warning("the shard receives gradients over ZeroMQ without encryption (--plain-data)")

    def _check_start(self, reply: pb.JoinReply, waited: float, start_timeout: float) -> None:
        if self.shard is not None and self.shard.ended:
            raise JobFailed(f"{self.shard} {self.shard.ended}; see its last log lines above")
        if waited > start_timeout:
            raise DeadlineExceeded(f"no start within {start_timeout:g} s (--timeout): {reply.text}")

    def _ask(self, request: pb.JoinRequest, again: bool = False) -> pb.JoinReply:
        """Sends a Join request.

        Retries for CONNECT_SECONDS. A server that has answered before (`again`) or proved itself may be too
        busy to answer for BUSY_SECONDS, and out of reach as long as its reply allowed.
        """
        began, logged = time.monotonic(), False
        known = again or self.access.certificate
        while True:
            self.presence.keep()
            try:
                reply = whole(self.stub.Join(request, timeout=CONNECT_SECONDS))
                reply.text = clean_message(reply.text)
                return reply
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                    raise ServerUnreachable(
                        f"the gRPC service at {self.address} is not ps-server;"
                        " use the port that the server's banner shows"
                    ) from error
                if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                    raise refused_error(self.address, details(error)) from error
                seconds = patience(error, BUSY_SECONDS, self.silent_seconds)
                patient = known and time.monotonic() < began + seconds
                if again and not patient:
                    raise ServerUnreachable(
                        f"the server at {self.address} stopped while this worker waited for the job"
                        f" to start ({describe(error)}); restart the server, then the workers"
                    ) from error
                if not patient and time.monotonic() + 0.2 > self.began + CONNECT_SECONDS:
                    raise _silent(self.address, self.began, f" ({describe(error)})") from error
                if not (logged or again):
                    log.info("no server at %s yet; retrying for %g s", self.address, CONNECT_SECONDS)
                logged = True
            time.sleep(0.2)


def _silent(address: str, began: float, detail: str = "") -> ServerUnreachable:
    return ServerUnreachable(
        f"no server answers at {address} after {time.monotonic() - began:.0f} s: {probe(address)}{detail}."
        f" Check the address, or start a server there: {start_command(address)}."
        f" To find the cause, run: ps-server doctor {address}"
    )

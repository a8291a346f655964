"""Admission: how a worker joins its job. It finds the server, brings a shard if asked to, and waits.

The law: it asks until the server answers at all, then again and again until all workers are there.
"""

from __future__ import annotations

import logging
import time

import grpc

from hubring.protos import control_pb2 as pb
from hubring.protos.control_pb2_grpc import ControlStub
from hubring.ps.config.address import address as split
from hubring.ps.config.kinds import LogFormat
from hubring.ps.core.errors import (
    ConfigError,
    DeadlineExceeded,
    Fenced,
    HubringError,
    JobFailed,
    NonFinite,
    ServerUnreachable,
)
from hubring.ps.process.child import Child
from hubring.ps.shard.colocated import place
from hubring.ps.shard.spawn import Settings, start
from hubring.ps.transport.port_probe import probe

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
"""How long a worker looks for its server: launchers start both at once."""

BY_EXIT_CODE: dict[int, type[HubringError]] = {1: NonFinite, 69: JobFailed, 75: Fenced, 78: ConfigError}
"""What the server refuses with, by the exit code that it sends."""


class Admission:
    """Asks a server for a place.

    Args:
        address: The server's `HOST:PORT`.
        stub: Calls it.
        log_format: How the log of a shard looks that the worker brings.
        trace: Folder for a trace of what such a shard does; empty: none.

    Attributes:
        shard: The shard that this worker brought, if the hub wanted one.
    """

    def __init__(self, address: str, stub: ControlStub, log_format: LogFormat, trace: str) -> None:
        self._address = address
        self._stub = stub
        self._log_format = log_format
        self._trace = trace
        self.shard: Child | None = None

    def join(self, request: pb.JoinRequest, start_timeout: float) -> pb.JoinReply:
        """Returns the worker's place once all others are there, for whom it waits `start_timeout` seconds.

        Raises:
            ServerUnreachable: No server answers, or not any more.
            DeadlineExceeded: The others did not come.
            JobFailed: The worker's shard has ended.
            HubringError: The server refuses this worker; says why.
        """
        began = time.monotonic()
        reply = self._ask(request)
        while reply.state in (pb.JoinReply.WAITING, pb.JoinReply.BRING_SHARD):
            waited = time.monotonic() - began
            if reply.state == pb.JoinReply.BRING_SHARD:
                self._bring_shard(reply)
                request.brings_shard = True
            else:
                mend = "start what is missing, or the server anew for fewer"
                log.info("%s, for %.0f s by now: %s", reply.text, waited, mend)
            self._check_start(reply, waited, start_timeout)
            reply = self._ask(request, again=True)
        if reply.state == pb.JoinReply.REFUSED:
            raise BY_EXIT_CODE.get(reply.exit_code, ConfigError)(reply.text)
        return reply

    def _bring_shard(self, reply: pb.JoinReply) -> None:
        dialled, _ = split(self._address)
        host = place(dialled, reply.server_host, reply.insecure)
        settings = Settings(self._address, host, self._log_format, reply.incarnation, trace=self._trace)
        self.shard = start("its shard", settings)
        log.info("the hub keeps its shards beside its workers: serving one on %s", host)

    def _check_start(self, reply: pb.JoinReply, waited: float, start_timeout: float) -> None:
        if self.shard is not None and self.shard.ended:
            raise JobFailed(f"{self.shard} {self.shard.ended}; its last lines above say why")
        if waited > start_timeout:
            raise DeadlineExceeded(f"gave up after {start_timeout:g} s: {reply.text}")

    def _ask(self, request: pb.JoinRequest, again: bool = False) -> pb.JoinReply:
        """Asks until the server answers at all, for CONNECT_SECONDS; `again` if it has answered before."""
        deadline, told = time.monotonic() + CONNECT_SECONDS, False
        while True:
            try:
                return self._stub.Join(request, timeout=CONNECT_SECONDS)
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                    raise ServerUnreachable(
                        f"what answers at {self._address} is a gRPC service, but no ps-server:"
                        " check the port, which the server's banner names"
                    ) from error
                if again:
                    raise ServerUnreachable(
                        f"the server at {self._address} was stopped while this worker waited for the job"
                        f" to begin ({sentence_of(error)}); start both again"
                    ) from error
                if time.monotonic() + 0.2 > deadline:
                    raise ServerUnreachable(
                        f"no server answers at {self._address} for {CONNECT_SECONDS:g} s:"
                        f" {probe(self._address)} ({sentence_of(error)}); check the address, or start one"
                        f" there: ps-server start --port {self._address.rpartition(':')[2]};"
                        f" ps-server doctor {self._address} looks for the cause"
                    ) from error
                if not told:
                    log.info("no server at %s yet; looking for %g s", self._address, CONNECT_SECONDS)
                told = True
            time.sleep(0.2)


def sentence_of(error: grpc.RpcError) -> str:
    """A failed call in words."""
    return f"{error.code().name}: {error.details()}"

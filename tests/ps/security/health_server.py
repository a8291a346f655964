"""A server of health checks that shows a certificate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from hubring.ps.security.access import Access
from hubring.ps.security.certificate import Identity
from hubring.ps.security.guard import Guard, Role
from hubring.ps.transport.grpc.channel import open_channel, server_credentials

SECONDS = 10.0
SECRET = "0123456789abcdef" * 4


@contextmanager
def serving(
    identity: Identity | None, authority: bytes = b"", secrets: Iterable[str] = (SECRET,)
) -> Iterator[str]:
    """Yields the address; without an identity there is no TLS."""
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
        if identity is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            guard = Guard(dict(zip(Role, secrets, strict=False)))
            port = server.add_secure_port("127.0.0.1:0", server_credentials(identity, guard, authority))
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


def asks(address: str, access: Access) -> int:
    with open_channel(address, access) as channel:
        request = health_pb2.HealthCheckRequest()
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=SECONDS).status

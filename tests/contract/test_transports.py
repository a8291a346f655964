"""Every transport passes the same checks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from hubring.ps.transport.base import Transport
from hubring.ps.transport.grpc.listener import GrpcListener
from hubring.ps.transport.grpc.transport import GrpcTransport
from hubring.ps.transport.shm.transport import ShmTransport
from hubring.ps.transport.zmq.listener import ZmqListener
from hubring.ps.transport.zmq.transport import ZmqTransport
from tests.support.transports.conformance import CHECKS
from tests.support.transports.connection_checks import (
    answers_many_requests_in_any_order,
    overtakes_only_by_priority,
)
from tests.support.transports.payload_checks import keeps_what_waits_where_it_is
from tests.support.transports.serving import MakeTransport

Check = Callable[[MakeTransport], None]


class ZmqOnHost(ZmqTransport):
    """Listens on a unix socket."""

    name = "zmq-unix"

    def listen(self, place: str) -> ZmqListener:
        return super().listen(str(Path(tempfile.mkdtemp()) / "zmq"))


class GrpcOnHost(GrpcTransport):
    """Listens on a unix socket."""

    name = "grpc-unix"

    def listen(self, place: str) -> GrpcListener:
        return super().listen(str(Path(tempfile.mkdtemp()) / "grpc"))


KINDS: list[type[Transport]] = [ShmTransport, ZmqTransport, GrpcTransport, ZmqOnHost, GrpcOnHost]
SLOW = {(answers_many_requests_in_any_order, kind) for kind in (GrpcTransport, GrpcOnHost)}
PAIRS = [
    pytest.param(
        check,
        kind,
        id=f"{kind.name}-{check.__name__}",
        marks=pytest.mark.slow if (check, kind) in SLOW else (),
    )
    for kind in KINDS
    for check in CHECKS
]


@pytest.mark.parametrize(("check", "kind"), PAIRS)
def test_transport(check: Check, kind: type[Transport]) -> None:
    check(kind)


# Lanes run side by side, so of equal messages the later may arrive first; each key has one under way.
# Each has a backlog of its own, so the bound on what waits is theirs together.
ON_LANES = [
    check for check in CHECKS if check not in (overtakes_only_by_priority, keeps_what_waits_where_it_is)
]


@pytest.mark.slow
@pytest.mark.parametrize("check", ON_LANES)
def test_grpc_with_several_lanes(check: Check) -> None:
    check(partial(GrpcTransport, lanes=3))


# Until the shard has heard of the line for replies, those before and after that may come in any order.
@pytest.mark.slow
@pytest.mark.parametrize("check", [check for check in CHECKS if check is not overtakes_only_by_priority])
def test_zmq_with_replies_apart(check: Check) -> None:
    check(partial(ZmqTransport, apart=True))

"""Every transport passes the same checks; then what is particular to each."""

from __future__ import annotations

import pytest

from ps.transport.conformance import CHECKS
from ps.transport.grpc import GrpcTransport
from ps.transport.inproc import InprocTransport
from ps.transport.shm import ShmTransport
from ps.transport.zmq import ZmqTransport

KINDS = [InprocTransport, ZmqTransport, ShmTransport, GrpcTransport]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_transport(check, kind):
    check(kind)

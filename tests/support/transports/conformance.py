"""Conformance checks for transports; the tests run each check on every transport.

    @pytest.mark.parametrize("check", CHECKS)
    def test_zmq(check): check(ZmqTransport)

A check gets a function that creates a transport. It uses one transport for both ends, and waits at most
PATIENCE.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

from tests.support.transports import connection_checks, payload_checks
from tests.support.transports.serving import MakeTransport

CHECKS: list[Callable[[MakeTransport], None]] = [
    check
    for checks in (payload_checks, connection_checks)
    for name, check in vars(checks).items()
    if isinstance(check, FunctionType) and check.__module__ == checks.__name__ and name[0] != "_"
]

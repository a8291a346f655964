"""A failed call in words."""

from __future__ import annotations

import grpc

from hubring.ps.transport.grpc.call_error import describe


class Refused(grpc.RpcError):
    """A call that failed; the peer sent the details."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str | None:
        return "\x1b[31mno\nserver"


def test_the_details_of_a_failed_call_are_cleaned() -> None:
    assert describe(Refused()) == "UNAVAILABLE: \N{REPLACEMENT CHARACTER}no\N{REPLACEMENT CHARACTER}server"

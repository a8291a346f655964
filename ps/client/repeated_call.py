"""A call to a server that a standby may replace meanwhile.

Law: every call of a worker may be repeated. A join is known by its token, a departure by its incarnation. A
plan or a value that the server has already is the same again. A measurement is planned once for all workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import grpc

from hubring.ps.core.errors import Fenced, HubringError
from hubring.ps.core.peer_text import clean_message
from hubring.ps.transport.grpc.call_error import whole

_T = TypeVar("_T")

RETRY_SECONDS = 0.1
"""Seconds between two attempts."""


def repeated(
    call: Callable[[], _T],
    silent_seconds: float,
    failure: Callable[[], HubringError | None],
    gone: Callable[[grpc.RpcError], HubringError],
) -> _T:
    """Calls a server, again and again while it is out of reach.

    Args:
        call: Calls it once.
        silent_seconds: How long the server may refuse connections.
        failure: Returns why the worker cannot continue, if it cannot.
        gone: Returns why it cannot continue after a call to a server that does not come back.

    Raises:
        Fenced: This worker lost its place.
        HubringError: This worker cannot continue, or the server is gone.
    """
    began = time.monotonic()
    while True:
        try:
            return whole(call())
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.PERMISSION_DENIED:
                raise Fenced(clean_message(error.details() or "")) from error
            out_of_reach = error.code() is grpc.StatusCode.UNAVAILABLE
            if failure() or not out_of_reach or time.monotonic() > began + silent_seconds:
                raise failure() or gone(error) from error
        time.sleep(RETRY_SECONDS)

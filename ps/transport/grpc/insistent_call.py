"""A call that is sent once more if no answer comes: a message can be lost on a connection that lives on.

Law: the first call goes on meanwhile, as the server may only be busy. So the method must be one that may be
called twice.
"""

from __future__ import annotations

import threading
from typing import Any


def insist(method: Any, request: Any, after: float, timeout: float) -> Any:
    """Calls a method, and once more if there is no answer; returns the first answer.

    Args:
        method: A unary method of a stub.
        request: Its argument.
        after: Seconds from the first call to the second.
        timeout: Seconds that each of the calls may take.

    Raises:
        grpc.RpcError: A call failed, before any was answered.
    """
    ended = threading.Event()
    calls: list[Any] = []
    for seconds in (after, timeout):
        calls.append(method.future(request, timeout=timeout))
        calls[-1].add_done_callback(lambda _: ended.set())
        if ended.wait(seconds):
            break
    first = next((call for call in calls if call.done()), calls[0])
    for call in calls:
        if call is not first:
            call.cancel()
    return first.result()

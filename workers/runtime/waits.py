"""What this process waits in, and on which line of its script.

The heartbeat's thread looks at the stacks of the others. So an exchange costs nothing more for it.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any

from hubring.ps.core.timing import Waiting
from hubring.ps.core.work import Work
from hubring.workers.communicators.base import Communicator

LONG_SECONDS = 5.0
"""Shorter waits are not reported."""

_LIBRARIES = {"hubring", "torch", "grpc", "zmq", "tqdm", "debugpy"} | sys.stdlib_module_names
"""What has threads that call no collective on their own."""


def what_waits(waiting: Waiting, communicator: Communicator) -> dict[str, Any]:
    """Returns the fields of `Telemetry` for the thread that has waited longest; none if it is not long."""
    longest = waiting.longest()
    if longest is None or longest[1] < LONG_SECONDS:
        return {}
    stacks = sys._current_frames()
    stack = list(_outwards(stacks.pop(longest[0], None)))
    work = next((frame.f_locals["self"] for frame in stack if frame.f_code is Work.wait.__code__), None)
    if any(frame.f_code.co_qualname == "Exchange._wait" for frame in stack):
        operation = "the exchange of gradients"  # of whichever bucket
    elif isinstance(work, Work):
        operation = work.what
    else:
        return {}
    stacks.pop(get_ident(), None)
    alone = not any(_package(one) not in _LIBRARIES for other in stacks.values() for one in _outwards(other))
    return {"operation": operation, "place": _place(stack), "held": alone and communicator.is_held()}


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _place(stack: list[FrameType]) -> str:
    """Returns the innermost line that is no library's."""
    frame = next((one for one in stack if _package(one) not in _LIBRARIES), None)
    if frame is None:
        return ""
    name, line = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(name).name}:{line}: {linecache.getline(name, line).strip()}"

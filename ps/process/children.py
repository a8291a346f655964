"""Children that end together."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from hubring.ps.process.child import GRACE_SECONDS, Child


class Endable(Protocol):
    """What `Children` needs of each; see `Child`."""

    def ask_to_stop(self) -> None: ...

    def end(self, seconds: float) -> None: ...


E = TypeVar("E", bound=Endable)
C = TypeVar("C", bound=Child)


class Children(Generic[E]):
    """Several children; leaving the `with` block ends them all.

    Args:
        grace: Seconds that they get to stop by themselves, all of them together.

    Attributes:
        started: All, in their order.
    """

    def __init__(self, grace: float = GRACE_SECONDS) -> None:
        self.started: list[E] = []
        self._grace = grace

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def add(self, child: E) -> E:
        """Takes in one more; returns it."""
        self.started.append(child)
        return child

    def signal(self: Children[C], number: int) -> None:
        """Sends all a signal."""
        for child in list(self.started):
            child.signal(number)

    def end(self) -> None:
        """Asks all to stop; kills those that are too slow."""
        for child in self.started:
            child.ask_to_stop()
        deadline = time.monotonic() + self._grace
        for child in self.started:
            child.end(max(0.0, deadline - time.monotonic()))


def first_ended(children: Iterable[C], seconds: float | None = None) -> C | None:
    """Waits for the first end among some children; one that has ended already counts.

    Args:
        children: Which.
        seconds: How long; None: as long as it takes.

    Returns:
        None if none of them ended.
    """
    running = []
    for child in children:
        if child.code is not None:
            return child
        running.append(child)
    with ExitStack() as stack:
        poller = select.poll()
        for child in running:
            descriptor = os.pidfd_open(child.pid)
            stack.callback(os.close, descriptor)
            poller.register(descriptor, select.POLLIN)
        poller.poll(None if seconds is None else 1e3 * seconds)
    return next((child for child in running if child.code is not None), None)

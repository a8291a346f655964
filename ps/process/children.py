"""Several child processes that end together."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Generic, Protocol, Self, TypeVar

from hubring.ps.process.child import GRACE_SECONDS, Child


class Endable(Protocol):
    """A process that can be ended like a `Child`."""

    def ask_to_stop(self) -> None: ...

    def end(self, seconds: float) -> None: ...


E = TypeVar("E", bound=Endable)
C = TypeVar("C", bound=Child)


class Children(Generic[E]):
    """Several children. Leaving the `with` block ends them all.

    Args:
        grace: Seconds that all of them together have to stop by themselves.

    Attributes:
        started: The children in the order in which they were added.
    """

    def __init__(self, grace: float = GRACE_SECONDS) -> None:
        self.started: list[E] = []
        self._grace = grace

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def add(self, child: E) -> E:
        """Adds a child and returns it."""
        self.started.append(child)
        return child

    def signal(self: Children[C], number: int) -> None:
        """Sends a signal to all children."""
        for child in list(self.started):
            child.signal(number)

    def end(self) -> None:
        """Asks all children to stop, then kills the ones that are too slow."""
        for child in self.started:
            child.ask_to_stop()
        deadline = time.monotonic() + self._grace
        for child in self.started:
            self._end_one(child, max(0.0, deadline - time.monotonic()))

    def _end_one(self, child: E, seconds: float) -> None:
        child.end(seconds)


def first_ended(children: Sequence[C], seconds: float | None = None) -> C | None:
    """Returns a child that has ended.

    Waits at most `seconds` for one (None for no limit). Returns None if no child ended.
    """
    with ExitStack() as stack:
        poller = select.poll()
        for child in children:
            if child.code is not None:
                return child
            try:
                descriptor = os.pidfd_open(child.pid)
            except ProcessLookupError:  # it ended just now, and a signal handler reaped it
                return child
            stack.callback(os.close, descriptor)
            poller.register(descriptor)
        poller.poll(None if seconds is None else 1e3 * seconds)
    return next((child for child in children if child.code is not None), None)


@contextmanager
def passing_on(numbers: Sequence[signal.Signals], send: Callable[[int], None]) -> Iterator[None]:
    """Passes these signals to `send` while the block runs. They have no other effect."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        send(number)

    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

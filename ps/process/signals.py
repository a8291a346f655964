"""Signals that this process gets and its children are to have."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType


@contextlib.contextmanager
def passing_on(numbers: Sequence[signal.Signals], send: Callable[[int], None]) -> Iterator[None]:
    """Gives `send` each of these signals that arrives while the block lasts; they have no other effect."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        send(number)

    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

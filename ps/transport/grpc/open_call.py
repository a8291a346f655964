"""A call that stays open for as long as a process lives, so that its server notices when the process ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class _Call(Protocol):
    def is_active(self) -> bool: ...

    def cancel(self) -> object: ...


class OpenCall:
    """Keeps one call open.

    Args:
        start: Starts the call, and does not wait.
    """

    def __init__(self, start: Callable[[], _Call]) -> None:
        self._start = start
        self._call: _Call | None = None

    def keep(self) -> None:
        """Starts the call, or starts it again if it has ended."""
        if self._call is None or not self._call.is_active():
            self._call = self._start()

    def close(self) -> None:
        """Ends the call."""
        if self._call is not None:
            self._call.cancel()

"""A promise: something under way, with one deadline and one error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hubring.ps.core.errors import DeadlineExceeded, HubringError

Attend = Callable[["Work", float | None], None]
"""May return early, for any reason: whoever waits then waits for others to bring the work on."""


class Work:
    """Completes when `parts` parts have completed, or fails with the first error.

    Made by whoever starts the exchange, completed by whoever reads the answers, waited for
    by the training thread. Buffers handed over belong to the exchange until then.

    Args:
        what: Names it in errors.
        parts: How many completions complete it.
        attend: Brings it on in the thread that waits, for so many seconds at most; None: others do.
    """

    def __init__(self, what: str, parts: int = 1, attend: Attend | None = None) -> None:
        self.what = what
        self.attend = attend
        self._left = parts
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._gate = threading.Lock()
        """Open once the work is over; a tenth of what a threading.Event costs."""
        self._gate.acquire()
        self._over = False
        self._callbacks: list[Callable[[Work], None]] = []
        if parts == 0:
            self._finish()

    def complete_part(self) -> None:
        """Counts one part down; the last one completes the work."""
        with self._lock:
            self._left -= 1
            if self._left > 0:
                return
        self._finish()

    def fail(self, error: BaseException) -> None:
        """Ends the work with `error`; only the first error counts."""
        with self._lock:
            if self._over or self._error is not None:
                return
            self._error = error
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            if not self._over:
                self._over = True
                self._gate.release()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def when_done(self, callback: Callable[[Work], None]) -> None:
        """Calls `callback(self)` once the work is over, at once if it is already."""
        with self._lock:
            if not self._over:
                self._callbacks.append(callback)
                return
        callback(self)

    @property
    def done(self) -> bool:
        return self._over

    @property
    def error(self) -> BaseException | None:
        return self._error

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the work is over.

        Args:
            timeout: Seconds; None waits without end.

        Raises:
            DeadlineExceeded: `timeout` seconds have passed; the work goes on.
            HubringError: What the work failed with.
        """
        if not self._over:
            end = None if timeout is None else time.monotonic() + timeout
            if self.attend is not None:
                self.attend(self, timeout)
            if not self._gate.acquire(timeout=-1 if end is None else max(0.0, end - time.monotonic())):
                raise DeadlineExceeded(f"{self.what} did not finish within {timeout:g} s")
            self._gate.release()  # for others that wait
        if self._error is not None:
            if isinstance(self._error, HubringError):
                raise self._error
            raise HubringError(f"{self.what} failed: {self._error}") from self._error

"""Work: a future with a deadline and one error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hubring.ps.core.errors import DeadlineExceeded, HubringError

Attend = Callable[["Work", float | None], None]
"""Makes progress in the calling thread, for at most the given seconds. It can return early; the
caller then waits for other threads to complete the work.
"""


class Work:
    """Completes when `parts` parts have completed, or fails with the first error.

    The thread that starts an exchange creates it. The thread that reads the replies
    completes it. The training thread waits for it. Buffers belong to the exchange until then.

    Args:
        what: The work's name in errors.
        parts: Number of completions that complete the work.
        attend: Makes progress in the waiting thread; None if only other threads do.

    Attributes:
        done: Whether the work is over.
        error: Why it failed; None if it has not.
    """

    def __init__(self, what: str, parts: int = 1, attend: Attend | None = None) -> None:
        self.what = what
        self.attend = attend
        self._left = parts
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._gate = threading.Lock()
        """Released when the work is over. Costs a tenth of a threading.Event."""
        self._gate.acquire()
        self.done = False
        self._callbacks: list[Callable[[Work], None]] = []
        if parts == 0:
            self._finish()

    def complete_part(self) -> None:
        """Completes one part. The last part completes the work."""
        with self._lock:
            self._left -= 1
            if self._left > 0:
                return
        self._finish()

    def fail(self, error: BaseException) -> None:
        """Ends the work with `error`. Only the first error counts."""
        with self._lock:
            if self.done or self.error is not None:
                return
            self.error = error
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            if not self.done:
                self.done = True
                self._gate.release()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def when_done(self, callback: Callable[[Work], None]) -> None:
        """Calls `callback(self)` when the work is over, or at once if it is over."""
        with self._lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback(self)

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the work is over.

        Args:
            timeout: Seconds; None for no limit.

        Raises:
            DeadlineExceeded: `timeout` seconds have passed. The work goes on.
            HubringError: The work failed.
        """
        if not self.done:
            end = None if timeout is None else time.monotonic() + timeout
            if self.attend is not None:
                self.attend(self, timeout)
            if not self._gate.acquire(timeout=-1 if end is None else max(0.0, end - time.monotonic())):
                raise DeadlineExceeded(
                    f"{self.what} did not finish within {timeout:g} s; raise --timeout, or timeout=... in the"
                    " script, if a worker may take this long"
                )
            self._gate.release()  # for other waiting threads
        if self.error is not None:
            if isinstance(self.error, HubringError):
                raise self.error
            raise HubringError(f"{self.what} failed: {self.error}") from self.error

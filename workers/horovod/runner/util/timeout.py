"""A time limit for several activities."""

from __future__ import annotations

import time

__all__ = ["Timeout", "TimeoutException"]


class TimeoutException(Exception):
    """The time is over."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Timeout:
    """A limit that starts now.

    Args:
        timeout: Seconds.
        message: The error message; `{activity}` in it stands for the activity.
    """

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout = timeout
        self._end = time.monotonic() + timeout
        self._message = message

    def remaining(self) -> float:
        """Returns the seconds that are left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def timed_out(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self._end

    def check_time_out_for(self, activity: str) -> None:
        """Checks that there is time left for an activity.

        Raises:
            TimeoutException: The time is over.
        """
        if self.timed_out():
            text = self._message.format(activity=activity).rstrip().removesuffix(".")
            raise TimeoutException(f"{text}. Timeout after {self._timeout} seconds.")

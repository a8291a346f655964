"""The last lines of the log, for the status page."""

from __future__ import annotations

import logging
from collections import deque
from itertools import count
from typing import NamedTuple

MAX_ENTRIES = 200
"""Entries to store. The oldest are dropped."""


class LogEntry(NamedTuple):
    """One line of the log."""

    number: int
    """Increases by one with each entry, from 1."""
    time: float
    """Seconds since 1970."""
    level: str
    """`info`, `warning` or `error`."""
    text: str


class Journal(logging.Handler):
    """Stores the last lines that this process logged at level INFO or above."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._entries: deque[LogEntry] = deque(maxlen=MAX_ENTRIES)
        self._numbers = count(1)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except Exception:  # a logging error must not stop the caller
            self.handleError(record)
            return
        self._entries.append(LogEntry(next(self._numbers), record.created, record.levelname.lower(), text))

    def entries(self) -> list[LogEntry]:
        """Returns the stored entries, oldest first."""
        return list(self._entries)

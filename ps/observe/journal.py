"""Journal: what happened lately, for whoever looks at the hub rather than at its log."""

from __future__ import annotations

import logging
from collections import deque
from itertools import count
from typing import NamedTuple

KEPT = 200
"""Older entries make room for new ones."""


class LogEntry(NamedTuple):
    """One line of the log."""

    number: int
    """Rises by one with each entry, from 1 on."""
    time: float
    """Seconds since 1970."""
    level: str
    """`info`, `warning` or `error`."""
    text: str


class Journal(logging.Handler):
    """Keeps the last lines that this process logged, of level INFO and above."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._entries: deque[LogEntry] = deque(maxlen=KEPT)
        self._numbers = count(1)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except Exception:  # whoever logs goes on, as with every handler
            self.handleError(record)
            return
        self._entries.append(LogEntry(next(self._numbers), record.created, record.levelname.lower(), text))

    def entries(self) -> list[LogEntry]:
        """What is kept, the oldest first."""
        return list(self._entries)

"""Counts what a process refused, by reason, without filling its log."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Literal

Reason = Literal[
    "token",
    "world size",
    "text",
    "board",
    "path",
    "message",
    "damage",
    "frame",
    "header",
    "parts",
    "streams",
    "silent stream",
    "connections",
    "descriptors",
    "handshake",
    "slow reader",
]
"""What was too large, too many, or not allowed. The values of the metrics' label."""


class Rejections:
    """Counts since the process started. Any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, reason: Reason, log: logging.Logger, text: str) -> None:
        """Counts one rejection, and logs the 1st, 2nd, 4th, 8th and so on of its reason.

        Args:
            reason: What was refused.
            log: The logger of the module that refused it.
            text: Who sent what, and the limit.
        """
        with self._lock:
            self._counts[reason] += 1
            count = self._counts[reason]
        if count & (count - 1) == 0:
            log.warning("%s%s", text, f" ({count} times since the start)" if count > 1 else "")

    def counts(self) -> dict[str, int]:
        """Returns the number of rejections by reason; only reasons that occurred."""
        with self._lock:
            return dict(self._counts)

"""The lifeline's process. It runs by path and isolated, and imports no module of Hubring."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable
from itertools import takewhile


def reap(words: Iterable[str]) -> None:
    """Tracks process groups until the words end, then kills those that are left.

    Args:
        words: `+PID` and `-PID`, one per line.
    """
    held: dict[int, None] = {}
    for word in words:
        pid = int(word[1:])
        if word[0] == "+":
            held[pid] = None
        else:
            held.pop(pid, None)
    for pid in held:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    reap(takewhile(str.strip, sys.stdin))

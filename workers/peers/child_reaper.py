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
    held: set[int] = set()
    for word in words:
        (held.add if word[0] == "+" else held.discard)(int(word[1:]))
    for pid in held:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    reap(takewhile(str.strip, sys.stdin))

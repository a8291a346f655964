"""What the lifeline's process does: it is run by its path, isolated, and imports no module of ours."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable
from itertools import takewhile


def keep(words: Iterable[str]) -> None:
    """Keeps what is held, until the words end; kills what is then left.

    Args:
        words: `+PID` and `-PID`, one a line.
    """
    held: dict[int, None] = {}
    for word in words:
        pid = int(word[1:])
        if word[0] == "+":
            held[pid] = None
        else:
            held.pop(pid, None)
    for pid in held:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself meanwhile
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    keep(takewhile(str.strip, sys.stdin))

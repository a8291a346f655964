"""The standard input of rank 0.

A worker has its own process group, so it cannot read the terminal: the kernel would stop it. A thread reads
the terminal and writes to a pipe. Rank 0 inherits any other input as it is, so nothing is read from it that
the script does not read.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import cache
from subprocess import DEVNULL
from threading import Thread

LOOK_SECONDS = 0.5
"""How often to look whether this process is in the foreground again."""
CHUNK_BYTES = 4096


@cache
def source() -> int | None:
    """Returns the standard input of rank 0, as `subprocess.Popen` takes it.

    A restarted rank 0 reads on where the one before it ended.
    """
    if sys.stdin is None:  # closed
        return DEVNULL
    terminal = sys.stdin.fileno()
    if not os.isatty(terminal):
        return None
    pipe, end = os.pipe()
    Thread(target=_carry, args=(terminal, end), name="keyboard", daemon=True).start()
    return pipe


def _carry(terminal: int, end: int) -> None:
    # With the signal blocked, a read in the background fails and does not stop this process.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTIN])
    while True:
        try:
            data = os.read(terminal, CHUNK_BYTES) if _in_foreground(terminal) else None
        except OSError:  # in the background since
            data = None
        if data is None:
            time.sleep(LOOK_SECONDS)
        elif data:
            os.write(end, data)
        else:
            os.close(end)
            return


def _in_foreground(terminal: int) -> bool:
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # a terminal without job control for this process
        return True

"""Trains digits with steps of some 20 ms; with the row hub-shm each takes 1.3 times as long.

The worker waits, as for a GPU: a step of 4 ms takes up to 18 % more or less in a second run. It does so on an
event, because a difference in `time.sleep()` would be found, and the speed withheld.
"""

from __future__ import annotations

import sys
import threading
import time

import hubring
from hubring.workers.examples import digits

SECONDS, FACTOR = 0.02, 1.3


def wait_in_steps(factor: float) -> None:
    """Makes each reported step of this process at least `SECONDS` long, and then this many times as long."""
    report, began = hubring.report, time.perf_counter()

    def late(**values: float) -> None:
        nonlocal began
        if "loss" in values:
            now = time.perf_counter()
            threading.Event().wait(factor * max(SECONDS, now - began) - (now - began))
        report(**values)
        began = time.perf_counter()

    vars(hubring)["report"] = late


if __name__ == "__main__":
    wait_in_steps(FACTOR if "shm" in sys.orig_argv else 1.0)
    digits.main()

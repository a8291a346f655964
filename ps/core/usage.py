"""What this process took of the machine."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import NamedTuple

_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)
"""proc(5). getrusage's ru_maxrss would not do: a program inherits it from whatever started it."""


class Usage(NamedTuple):
    """All of its threads, since it was started.

    Attributes:
        cpu_ns: Nanoseconds of cores, its own and the kernel's for it.
        peak_bytes: The most memory that it held at a time, memory shared with others included.
    """

    cpu_ns: int
    peak_bytes: int


def usage() -> Usage:
    """Up to now."""
    peak = _PEAK.search(Path("/proc/self/status").read_text())
    assert peak is not None, "Linux tells every process its peak"
    return Usage(time.process_time_ns(), int(peak[1]) << 10)

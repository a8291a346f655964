"""What this process took of the machine."""

from __future__ import annotations

import resource
from typing import NamedTuple


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
    told = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(round((told.ru_utime + told.ru_stime) * 1e9), told.ru_maxrss << 10)

"""This machine's own clocks: the one that leases run on must not go backward, the other should be set."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from hubring.ps.doctor.finding import Finding, failure, ok, warning

NAME = "clock"
READINGS = 1000
WRITTEN = datetime(2026, 1, 1, tzinfo=UTC)
"""All of this is younger: a clock that shows an earlier time was never set."""

_SOURCE = "/sys/devices/system/clocksource/clocksource0"


def judge(monotonic: Sequence[int], wall: datetime) -> Finding:
    """Whether they can be relied on.

    Args:
        monotonic: Nanoseconds, read one after the other.
        wall: The time of the day.
    """
    back = max((before - after for before, after in itertools.pairwise(monotonic)), default=0)
    if back > 0:
        return failure(
            NAME,
            f"the monotonic clock went back by {back} ns: leases would end at random",
            f"echo NAME > {_SOURCE}/current_clocksource, with another of those in available_clocksource",
        )
    if wall < WRITTEN:
        found = f"it shows {wall:%Y-%m-%d %H:%M}, when this program was not written yet"
        return warning(NAME, found, "timedatectl set-ntp true, or chronyc makestep")
    return ok(NAME, f"{wall:%Y-%m-%d %H:%M:%S} UTC; the monotonic one goes forward")


def examine() -> Iterator[Finding]:
    """Reads both."""
    yield judge([time.monotonic_ns() for _ in range(READINGS)], datetime.now(UTC))

"""What a switch costs whose buffer cannot hold what all workers send to one server at once.

Where the buffer overflows, TCP repeats what was dropped. The link stays busy meanwhile, so only the end of
the exchange is late: by half the time of a full buffer, a rough estimate. Four workers with 1 MiB each and a
buffer of 100 ms at 200 Mbit/s took 12 % longer than without drops (ps/MEASUREMENTS.md); this rule gives 14 %.
If a worker's share of the buffer is less than a few segments, it loses whole windows and waits for TCP's
timer (Phanishayee et al., "Measurement and analysis of TCP throughput collapse", FAST 2008).
"""

from __future__ import annotations

WINDOW = 4 << 20
"""Most bytes in flight on one connection: Linux's default limit of a send buffer."""
TIMER = 0.2
"""Seconds: Linux's shortest retransmission timer."""
SEGMENT, FEWEST = 1448, 4
"""Bytes of a segment, and how many of them in flight let TCP repeat one without the timer."""


def delay(workers: int, nbytes: float, rate: float, round_trip: float, buffer: float) -> float:
    """Returns the seconds by which dropped packets delay an exchange.

    Args:
        workers: Workers that send to one server at once.
        nbytes: Bytes that each sends to it.
        rate: Bits per second of the server's link.
        round_trip: Seconds there and back.
        buffer: Bytes of the switch's port to that server.
    """
    room = buffer + rate / 8 * round_trip
    if workers < 2 or workers * min(nbytes, WINDOW) <= room:
        return 0.0
    timer = TIMER if room / workers < FEWEST * SEGMENT else 0.0
    return buffer * 8 / rate / 2 + timer

"""The crossing: from how many servers on a synchronous hub is faster than the ring."""

from __future__ import annotations

import math
from collections.abc import Callable

FORMULA = "k > n^2/(2(n-1))"
"""Servers k with which the hub beats the ring of n workers, all links alike and bytes all that counts:
a ring moves 2(n-1)/n of the model each way in a step, a server max(1, n/k)."""


def servers_needed(workers: int) -> int | None:
    """The fewest servers with which the hub wins by the formula; None where it cannot: alone, or in a tie."""
    # Beyond k = n a worker's own link is the limit, and both then move as much only with n = 2.
    return None if workers <= 2 else math.floor(workers**2 / (2 * (workers - 1))) + 1


def most_servers(workers: int) -> int:
    """Up to how many a crossing is looked for: with more, no link has less to carry.

    What counts is the server with the most slices. Twice as many servers as workers leave it no more than
    a worker's own link carries, however many slices there are, if there is one for every worker.
    """
    return 2 * workers


def overtaking(hub: Callable[[int], float], ring: float, workers: int) -> int | None:
    """From how many servers on the hub's step is shorter with all up to `most_servers`; None: not with these.

    Args:
        hub: Seconds of its step with so many servers.
        ring: Seconds of the ring's.
        workers: Of both.
    """
    # More servers may do worse again, as where a slice more falls to one: a first win is no crossing.
    most = most_servers(workers)
    last_lost = next((servers for servers in range(most, 0, -1) if hub(servers) >= ring), 0)
    return None if last_lost == most else last_lost + 1

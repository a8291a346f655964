"""The crossing: the number of servers from which a synchronous hub is faster than the ring."""

from __future__ import annotations

import math
from collections.abc import Callable

FORMULA = "k > n^2/(2(n-1))"
"""Servers k with which the hub beats the ring of n workers, if all links are alike and only bytes count.
A ring moves 2(n-1)/n of the model each way in a step, a server max(1, n/k)."""


def servers_needed(workers: int, sharing: int = 1) -> int | None:
    """Returns the fewest servers with which the hub wins by the formula; None if it never wins.

    Args:
        workers: Number of workers.
        sharing: Workers of each host, which share its link. A hub's workers push and pull the model each, and
            a ring passes each host once.
    """
    # Beyond k = n / sharing the workers' own link is the limit: `sharing` models, and below 2 with a ring.
    return None if workers <= 2 or sharing >= 2 else math.floor(workers**2 / (2 * (workers - 1))) + 1


def most_servers(workers: int) -> int:
    """Returns the largest number of servers to try for a crossing; with more, no link carries less.

    The server with the most slices is the limit. With twice as many servers as workers it carries no more
    than a worker's own link, for any number of slices that is at least the number of workers.
    """
    return 2 * workers


def overtaking(hub: Callable[[int], float], ring: float, workers: int) -> int | None:
    """Returns from how many servers up to `most_servers` the hub's step is always shorter; None: from none.

    Args:
        hub: Returns the seconds of its step for a number of servers.
        ring: Seconds of the ring's step.
        workers: Of both.
    """
    # More servers can be slower again, for example if one gets an extra slice: a first win is no crossing.
    most = most_servers(workers)
    last_lost = next((servers for servers in range(most, 0, -1) if hub(servers) >= ring), 0)
    return None if last_lost == most else last_lost + 1

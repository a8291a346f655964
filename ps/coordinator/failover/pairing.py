"""Which standby follows which shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hubring.ps.coordinator.shard_fleet import Shard


def pairs(shards: Sequence[Shard], standbys: Sequence[Shard]) -> list[tuple[Shard, Shard]]:
    """Returns pairs of a shard and a standby, on different hosts where there are enough of them.

    Shards and standbys are sorted by host. If each host has as many of the one as of the other, and none has
    more than half of the shards, moving the standbys by the most on one host separates all pairs.
    """
    if not shards:
        return []
    shards, free = sorted(shards, key=_host), sorted(standbys, key=_host)
    shift = max(Counter(map(_host, shards)).values()) % max(1, len(free))
    free = free[shift:] + free[:shift]
    found: list[tuple[Shard, Shard]] = []
    for apart in (True, False):  # first those that can be on another host
        for shard in [shard for shard in shards if shard not in [one for one, _ in found]]:
            standby = next((each for each in free if not apart or each.host != shard.host), None)
            if standby is not None:
                free.remove(standby)
                found.append((shard, standby))
    return found


def _host(shard: Shard) -> str:
    return shard.host

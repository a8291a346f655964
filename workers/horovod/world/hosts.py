"""Who shares a host with whom: the local and cross ranks of Horovod."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """A rank among those on its host, and its host among the hosts.

    Attributes:
        local_rank: How many lower ranks are on this host.
        local_size: Ranks on this host.
        cross_rank: Which of the hosts that have such a local rank this one is.
        cross_size: How many hosts have such a local rank.
        is_homogeneous: Every host has as many ranks.
    """

    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    is_homogeneous: bool = True


def neighbourhood(rank: int, hosts: Sequence[Hashable]) -> Neighbourhood:
    """Where `rank` stands; `hosts` names every rank's host, in rank order."""
    here = hosts[rank]
    counts = Counter(hosts)
    local_rank = list(hosts[:rank]).count(here)
    # A Counter keeps the order in which hosts first appear, which is that of their lowest rank.
    having = [host for host, count in counts.items() if count > local_rank]
    return Neighbourhood(
        local_rank,
        counts[here],
        having.index(here),
        len(having),
        len(set(counts.values())) == 1,
    )

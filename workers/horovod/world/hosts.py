"""Horovod's local and cross ranks, from the host of each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """A rank's index on its host, and the host's index among the hosts.

    Attributes:
        local_rank: Number of lower ranks on this host.
        local_size: Number of ranks on this host.
        cross_rank: Index of this host among the hosts with this local rank.
        cross_size: Number of hosts with this local rank.
        is_homogeneous: Whether every host has the same number of ranks.
    """

    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    is_homogeneous: bool = True


def neighbourhood(rank: int, hosts: Sequence[Hashable]) -> Neighbourhood:
    """Returns the neighbourhood of `rank`; `hosts` holds the host of every rank, in rank order."""
    here = hosts[rank]
    counts = Counter(hosts)
    local_rank = list(hosts[:rank]).count(here)
    # A Counter preserves the order in which hosts first appear, which is the order of their lowest ranks.
    having = [host for host, count in counts.items() if count > local_rank]
    return Neighbourhood(
        local_rank,
        counts[here],
        having.index(here),
        len(having),
        len(set(counts.values())) == 1,
    )

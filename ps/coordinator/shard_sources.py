"""Where a job's shards come from: the server, hosts that join it, or each worker brings one.

Law: a job begins when as many shards are there as it needs, and their numbers
are 0, 1, 2, ... from then on. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from hubring.ps.core.errors import ConfigError
from hubring.ps.job.job import Job

if TYPE_CHECKING:
    from hubring.ps.coordinator.shard_fleet import Shard


class ShardSources(Protocol):
    """What the coordinator asks before a job has begun."""

    def wanted(self, job: Job) -> int:
        """How many shards a hub's job needs, as far as is known."""

    def number(self, worker: int, job: Job, shards: Sequence[Shard]) -> int:
        """A new shard's number; `worker` is the incarnation of the one that brings it, or 0.

        Raises:
            ConfigError: There is no use for it.
        """

    def orphans(self, job: Job, shards: Sequence[Shard], heard_since: float) -> list[Shard]:
        """Shards that the job, not begun yet, does better without; `heard_since` is when leases begin."""


class OwnShards:
    """The server's: those on its own host, and those of other hosts that join it (`--shards`, `--join`).

    Args:
        count: How many a job waits for, of both kinds; whoever comes beyond that is welcome until it begins.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def wanted(self, job: Job) -> int:
        return self._count

    def number(self, worker: int, job: Job, shards: Sequence[Shard]) -> int:
        return len(shards)

    def orphans(self, job: Job, shards: Sequence[Shard], heard_since: float) -> list[Shard]:
        return []


class WorkersShards:
    """One of each worker, on its host and under its rank (`--colocate`).

    Until the job begins, a shard goes with its worker: whoever takes the place brings another.
    """

    def wanted(self, job: Job) -> int:
        return job.world_size

    def number(self, worker: int, job: Job, shards: Sequence[Shard]) -> int:
        for member in job.members:
            if member.incarnation == worker:
                return member.rank
        raise ConfigError(
            "the worker that brought this shard has left"
            if worker
            else "this hub runs with --colocate: its workers bring its shards, and it takes no others"
        )

    def orphans(self, job: Job, shards: Sequence[Shard], heard_since: float) -> list[Shard]:
        present = {member.incarnation for member in job.members}
        return [shard for shard in shards if shard.worker not in present or shard.heard < heard_since]

"""Where a job's shards come from: the server, hosts that join it, or its workers.

Law: a job begins when it has as many shards as it needs. From then on their
numbers are 0, 1, 2, ... No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from hubring.ps.config.server import ServerConfig
from hubring.ps.core.errors import ConfigError
from hubring.ps.job.job import Job

if TYPE_CHECKING:
    from hubring.ps.coordinator.shard_fleet import Shard


class ShardSources(Protocol):
    """The coordinator's questions about shards before a job begins."""

    def wanted(self, job: Job) -> int:
        """Returns how many shards a hub's job needs."""

    def number(self, worker: int, job: Job, shards: Sequence[Shard]) -> int:
        """Returns a new shard's number; `worker` is the incarnation of the worker that started it, or 0.

        Raises:
            ConfigError: The job cannot use the shard.
        """

    def orphans(self, job: Job, shards: Sequence[Shard], heard_since: float) -> list[Shard]:
        """Returns the shards to remove from a job that has not begun.

        Args:
            job: The job.
            shards: Its shards.
            heard_since: A shard with an older last heartbeat has an expired lease.
        """


class OwnShards:
    """The shards on the server's host, and the shards of other hosts (`--shards`, `--join`).

    Args:
        count: How many shards of both kinds a job waits for. More can join until the job begins.
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
    """One shard per worker, on the worker's host and with its rank as number (`--colocate`).

    Until the job begins, a shard is removed together with its worker. The next worker with that rank
    starts another shard.
    """

    def wanted(self, job: Job) -> int:
        return job.world_size

    def number(self, worker: int, job: Job, shards: Sequence[Shard]) -> int:
        for member in job.members:
            if member.incarnation == worker:
                return member.rank
        raise ConfigError(
            "the worker of this shard has left the job"
            if worker
            else "this server runs with --colocate, so its workers start all shards;"
            " restart it without --colocate to add shards with --join"
        )

    def orphans(self, job: Job, shards: Sequence[Shard], heard_since: float) -> list[Shard]:
        present = {member.incarnation for member in job.members}
        return [shard for shard in shards if shard.worker not in present or shard.heard < heard_since]


def shard_sources(config: ServerConfig) -> ShardSources:
    """Returns where the shards of a server's jobs come from."""
    return WorkersShards() if config.colocate else OwnShards(config.shards + config.await_shards)

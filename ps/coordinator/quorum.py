"""Which workers and shards a job needs before it can begin."""

from __future__ import annotations

from hubring.ps.coordinator.shard_fleet import Fleet
from hubring.ps.coordinator.shard_sources import ShardSources
from hubring.ps.job.job import Job


class Quorum:
    """Counts one job's workers and shards.

    Args:
        job: The job.
        fleet: The shards that have joined.
        sources: Decides how many shards the job needs.
        colocate: Whether each worker starts a shard.
        awaited: How many shards of other hosts the server waits for.
    """

    def __init__(
        self, job: Job, fleet: Fleet, sources: ShardSources, *, colocate: bool, awaited: int
    ) -> None:
        self._job = job
        self._fleet = fleet
        self._sources = sources
        self._colocate = colocate
        self._awaited = awaited

    @property
    def complete(self) -> bool:
        """Whether all workers and shards that the job needs have joined."""
        return self._job.started and len(self._fleet.shards) >= self.shards_wanted

    @property
    def shards_wanted(self) -> int:
        """How many shards the job needs before it can begin; a ring needs none."""
        return 0 if self._job.topology == "ring" else self._sources.wanted(self._job)

    @property
    def shards_missing(self) -> str:
        """How many shards are missing, in words; empty if none are."""
        missing = self.shards_wanted - len(self._fleet.shards)
        return f"waiting for {missing} of {self.shards_wanted} shards" if missing > 0 else ""

    def waiting_for(self) -> str:
        """Returns what is missing, in words; with --colocate only workers, because they start the shards."""
        shards = self.shards_missing
        if shards and (self._job.started or not self._colocate):
            others = self._awaited
            hint = f" ({others} from other hosts: ps-server start --join ADDR)" if others else ""
            return f"{shards}{hint}"
        return self._job.waiting_for()

"""Quorum: who must be there before a job may begin."""

from __future__ import annotations

from hubring.ps.coordinator.shard_fleet import Fleet
from hubring.ps.coordinator.shard_sources import ShardSources
from hubring.ps.job.job import Job


class Quorum:
    """Counts one job's workers and shards.

    Args:
        job: The job.
        fleet: The shards that are there.
        sources: Says how many the job needs.
        colocate: Each worker brings one.
        awaited: How many the server waits for from other hosts.
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
        """Whether everybody is there whom the job needs."""
        return self._job.started and len(self._fleet.shards) >= self.shards_wanted

    @property
    def shards_wanted(self) -> int:
        """How many shards the job needs before it may begin; a ring needs none."""
        return 0 if self._job.topology == "ring" else self._sources.wanted(self._job)

    @property
    def shards_missing(self) -> str:
        """How many shards are missing, in words; empty if none is."""
        missing = self.shards_wanted - len(self._fleet.shards)
        return f"waiting for {missing} of {self.shards_wanted} shards" if missing > 0 else ""

    def waiting_for(self) -> str:
        """Who is missing, as a sentence; under --colocate the workers, who bring the shards."""
        shards = self.shards_missing
        if shards and (self._job.started or not self._colocate):
            others = self._awaited
            hint = f" ({others} from other hosts: ps-server start --join ADDR)" if others else ""
            return f"{shards}{hint}"
        return self._job.waiting_for()

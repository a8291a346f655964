"""Which workers and shards a job needs before it can begin."""

from __future__ import annotations

from hubring.ps.coordinator.shard_fleet import Fleet
from hubring.ps.coordinator.shard_sources import ShardSources
from hubring.ps.job.job import Job
from hubring.ps.job.joiner import Joiner


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
        return self._job.started and not self.shards_missing

    @property
    def shards_wanted(self) -> int:
        """How many shards the job needs before it can begin; a ring needs none."""
        return 0 if self._job.topology == "ring" else self._sources.wanted(self._job)

    @property
    def shards_missing(self) -> str:
        """How many shards are missing, in words; empty if none are.

        Shards that the server or the workers start are on their way: they import torch.
        """
        missing, wanted = self.shards_wanted - len(self._fleet.shards), self.shards_wanted
        if missing <= 0 and wanted and not self._fleet.guarded:
            return f"{'waiting for' if self._awaited else 'starting'} the standbys of {wanted} shards"
        if missing <= 0:
            return ""
        return f"{'waiting for' if self._awaited else 'starting'} {missing} of {wanted} shards"

    def awaited(self, joiner: Joiner) -> str:
        """Returns what a worker that asked to join waits for, and the fix, in words."""
        if self._job.ends_before(joiner):
            return self._job.ending()
        return ". ".join(filter(None, (self.waiting_for(), self.fix())))

    def waiting_for(self) -> str:
        """Returns what is missing before the job can begin, in words."""
        parts = [self._awaited_shards(), "" if self._job.started else self._job.waiting_for()]
        return "; ".join(filter(None, parts))

    def fix(self) -> str:
        """Returns what a person can do about it; empty if only shards are on their way."""
        if not self._job.started:
            return "Start them, or restart the server with a smaller --workers"
        if self._awaited and self.shards_missing:
            return "Start them, or restart the server with a smaller --await-shards"
        return ""

    def _awaited_shards(self) -> str:
        """Returns the missing shards; with --colocate none before all workers joined, who start them."""
        shards = self.shards_missing
        if not shards or (self._colocate and not self._job.started):
            return ""
        others = self._awaited
        flag = "" if self._fleet.guarded else " --standby 1"
        return shards + (f" ({others} from other hosts: ps-server start --join ADDR{flag})" if others else "")

"""Publishes the members of a job to its shards."""

from __future__ import annotations

import asyncio

from hubring.ps.coordinator.shard_fleet import Fleet
from hubring.ps.job.membership import Membership


class ViewPublisher:
    """Publishes one job's views, one at a time and each once.

    Args:
        fleet: The shards.
        publishing: Locked while a view goes to the shards; shared by the publishers of all jobs.

    Attributes:
        epoch: Epoch of the view that all shards use.
    """

    def __init__(self, fleet: Fleet, publishing: asyncio.Lock) -> None:
        self._fleet = fleet
        self._publishing = publishing
        self.epoch = 0

    async def publish(self, membership: Membership) -> None:
        """Sends the current view to every shard; returns when all shards use it.

        Raises:
            JobFailed: A shard does not answer.
        """
        async with self._publishing:
            view = membership.view
            if view.epoch > self.epoch:
                await self._fleet.set_view(view)
                self.epoch = view.epoch

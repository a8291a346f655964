"""The schedule of checkpoints: sees to it that what the shards hold is saved in time, and once at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from hubring.ps.checkpoint import checkpoint_folder as checkpoints
from hubring.ps.checkpoint.checkpoint_folder import Manifest
from hubring.ps.coordinator.checkpoint_publisher import CheckpointWriter, Held
from hubring.ps.coordinator.shard_fleet import Fleet
from hubring.ps.core.errors import ConfigError, HubringError
from hubring.ps.core.timing import TimeSource

log = logging.getLogger(__name__)


class CheckpointSchedule:
    """Takes checkpoints of one job after the other.

    Args:
        fleet: The shards that write them.
        directory: Where they go; None: there will be none.
        every: Seconds from one checkpoint to the next.
        clock: Where the time comes from.
        held: Tells what the shards hold now; raises ConfigError where that is nothing.
        last: The newest checkpoint, if there is one already.
    """

    def __init__(
        self,
        fleet: Fleet,
        directory: Path | None,
        every: float,
        clock: TimeSource,
        held: Callable[[], Held],
        last: Path | None,
    ) -> None:
        self.last = last
        self.written = 0
        """Checkpoints that this server wrote."""
        self._writer = CheckpointWriter(fleet, directory) if directory else None
        self._directory = directory
        self._every = every
        self._clock = clock
        self._held = held
        self._saving = asyncio.Lock()
        self._passing: asyncio.Task[None] | None = None
        self._under_way: asyncio.Task[tuple[Path, int]] | None = None
        self.begin()

    def begin(self) -> None:
        """A job begins, and with it the time until its first checkpoint."""
        self._tried_at = self._saved_at = self._clock.now()

    def due(self, now: float) -> bool:
        """Whether it is time for the next one."""
        waited = now - self._tried_at >= self._every
        return self._writer is not None and waited and not self._saving.locked()

    def age(self, now: float) -> float | None:
        """Seconds since the last one, or since the job began that has none; None where there will be none."""
        return None if self._writer is None else now - self._saved_at

    def newest(self) -> tuple[Path, Manifest] | None:
        """From where a job that broke off goes on."""
        return checkpoints.newest(self._directory) if self._directory else None

    async def save(self) -> tuple[Path, int]:
        """Writes a checkpoint now; returns its folder and its step.

        Raises:
            ConfigError: There is no directory, nothing to save, or it was given up.
        """
        if self._writer is None:
            raise ConfigError("the server was started without --checkpoint-dir: start it again with one")
        async with self._saving:
            work = self._under_way = asyncio.create_task(self._writer.save(self._held()))
            try:
                await asyncio.wait([work])
            finally:
                work.cancel()  # whoever asked is gone
            if work.cancelled():
                raise ConfigError("the job came to rest before all shards had reached the step to be saved")
            self.last, step = work.result()
            self.written += 1
            self.begin()
        return self.last, step

    def save_in_passing(self) -> None:
        """Begins a checkpoint and does not wait: it may take many steps, and leases run meanwhile."""
        self._passing = asyncio.create_task(self._try_to_save())

    async def give_up(self) -> None:
        """Ends a checkpoint under way, whoever asked for it: the job is at rest, its step will not come."""
        for task in (self._passing, self._under_way):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def save_last(self) -> None:
        """Writes a checkpoint of the job at rest, if there is a place for it."""
        if self._writer is not None:
            await self._try_to_save()

    async def _try_to_save(self) -> None:
        try:
            await self.save()
        except HubringError as error:
            log.error("no checkpoint: %s; the last one is %s", error, self.last or "none")
            self._tried_at = self._clock.now()

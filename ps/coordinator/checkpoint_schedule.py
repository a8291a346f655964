"""The schedule of checkpoints: saves the shards at an interval, one checkpoint at a time."""

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
    """Takes the checkpoints of all jobs of a server.

    Args:
        fleet: The shards that write the checkpoints.
        directory: The checkpoint directory; None disables checkpoints.
        every: Seconds from one checkpoint to the next.
        clock: The source of the time.
        held: Returns what the shards hold now; raises ConfigError if they hold no parameters.
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
        self.failure: HubringError | None = None
        """Why the job's last attempt to save failed."""
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
        """Restarts the time until the next checkpoint; called at the start of a job and after each save."""
        self.failure = None
        self._tried_at = self._saved_at = self._clock.now()

    def due(self, now: float) -> bool:
        """Returns whether it is time for the next checkpoint."""
        waited = now - self._tried_at >= self._every
        return self._writer is not None and waited and not self._saving.locked()

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._saving.locked()

    def hasten(self) -> None:
        """Makes the next checkpoint due."""
        self._tried_at = self._clock.now() - self._every

    def age(self, now: float) -> float | None:
        """Returns the seconds since the last checkpoint, or since the job began; None without checkpoints."""
        return None if self._writer is None else now - self._saved_at

    def newest(self) -> tuple[Path, Manifest] | None:
        """Returns the checkpoint from which a failed job resumes."""
        return checkpoints.newest(self._directory) if self._directory else None

    async def save(self) -> tuple[Path, int]:
        """Writes a checkpoint now; returns its folder and its step.

        Raises:
            ConfigError: There is no directory, there is nothing to save, or the save was cancelled.
        """
        if self._writer is None:
            raise ConfigError("this server writes no checkpoints; restart the server with --checkpoint-dir")
        async with self._saving:
            work = self._under_way = asyncio.create_task(self._writer.save(self._held))
            try:
                await asyncio.wait([work])
            finally:
                work.cancel()  # if the caller was cancelled
                await asyncio.wait([work])
            if work.cancelled():
                raise ConfigError("the job stopped before all shards reached the step to save")
            self.last, step = work.result()
            self.written += 1
            self.begin()
        return self.last, step

    def save_in_passing(self) -> None:
        """Begins a checkpoint without waiting: it can take many steps, and the leases need checks."""
        if self._passing is not None:
            self._passing.result()  # raises what was not expected
        self._passing = asyncio.create_task(self._try_to_save())

    async def give_up(self) -> None:
        """Cancels any checkpoint in progress: the job has stopped and will not reach the step to save."""
        for task in (self._passing, self._under_way):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait([task])
        if self._passing is not None and not self._passing.cancelled():
            self._passing.result()
        self._passing = None

    async def save_last(self) -> None:
        """Writes a checkpoint of the stopped job, if there is a checkpoint directory."""
        if self._writer is not None:
            await self._try_to_save()

    async def _try_to_save(self) -> None:
        try:
            await self.save()
        except HubringError as error:
            newest = f"the newest checkpoint is {self.last}" if self.last else "there is no checkpoint yet"
            log.error("checkpoint failed: %s; %s", error, newest)
            self.failure = error
            self._tried_at = self._clock.now()

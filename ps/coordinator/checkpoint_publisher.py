"""The writer of checkpoints: brings all shards to one common step and publishes what they wrote."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from hubring.ps.checkpoint import checkpoint_folder as checkpoints
from hubring.ps.checkpoint.checkpoint_folder import FileEntry, Manifest
from hubring.ps.coordinator.shard_fleet import Fleet
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import BucketSpec, ShardPlan

log = logging.getLogger(__name__)

ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class Held:
    """What the shards hold, as far as the coordinator knows."""

    job: str
    mode: str
    buckets: tuple[BucketSpec, ...]
    plan: ShardPlan
    next_incarnation: int
    lockstep: bool
    """Versions are steps."""
    running: bool
    """Workers push meanwhile."""
    step: int
    """What to call the checkpoint where versions are not steps."""


class CheckpointWriter:
    """Writes checkpoints of a fleet into one directory, which every shard's host must share."""

    def __init__(self, fleet: Fleet, directory: Path) -> None:
        self._fleet = fleet
        self._directory = directory

    async def save(self, held: Held) -> tuple[Path, int]:
        """Writes one checkpoint.

        A running lockstep job is caught at a version that no key has passed yet:
        each shard clones a key at the moment when it gets there, and nobody waits.
        A job at rest, or an asynchronous one, is taken as it is.

        Returns:
            The checkpoint's folder and the step that it holds.

        Raises:
            ConfigError: The directory or a shard's disk cannot be written, or the
                workers stopped short of the step that was to be saved.
        """
        folder = checkpoints.begin(self._directory)
        try:
            step, version = held.step, -1
            if held.lockstep:
                holding = {piece.shard for piece in held.plan.slices}  # others are at no step
                stats = [each for each in await self._fleet.stats() if each.shard in holding]
                oldest, newest = min(each.oldest for each in stats), max(each.newest for each in stats)
                step, version = (newest + 1, newest + 1) if held.running else (newest, -1)
                if not held.running and oldest != newest:
                    raise ConfigError(
                        f"the job broke off between step {oldest} and {newest}: no step is whole,"
                        " the checkpoint before stays the last"
                    )
            for attempt in range(ATTEMPTS):
                replies = await self._fleet.save(folder, version)
                if not any(reply.too_late for reply in replies):
                    break
                # The job outran us: aim further ahead each time.
                step = version = max(reply.newest for reply in replies) + 2**attempt
            else:
                raise ConfigError(f"the job ran past {ATTEMPTS} steps at which it was to be saved")
            for reply in replies:
                if reply.refused:
                    raise ConfigError(f"a shard could not save. {reply.refused}")
            files = tuple(
                FileEntry(reply.file, reply.sha256, reply.bytes, tuple(reply.keys)) for reply in replies
            )
            manifest = Manifest(
                held.job, held.mode, step, held.next_incarnation, held.buckets, held.plan.slices, files
            )
            path = checkpoints.publish(folder, manifest)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        log.info("checkpoint of step %d in %s", step, path)
        return path, step

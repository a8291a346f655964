"""Writes checkpoints: every shard saves the same step, then the coordinator publishes the files."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from hubring.ps.checkpoint import checkpoint_folder as checkpoints
from hubring.ps.checkpoint.checkpoint_folder import FileEntry, Manifest
from hubring.ps.coordinator.shard_fleet import Fleet
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import BucketSpec, ShardPlan

log = logging.getLogger(__name__)

_T = TypeVar("_T")

ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class Held:
    """What the coordinator knows about the state of the shards."""

    job: str
    mode: str
    buckets: tuple[BucketSpec, ...]
    plan: ShardPlan
    next_incarnation: int
    lockstep: bool
    """Whether versions are steps."""
    together: bool
    """Whether every step is a round of every key. With backup workers, keys can close different rounds."""
    running: bool
    """Whether workers push during the save."""
    joined: tuple[int, ...] = ()
    """Numbers of buckets that joined together, in order."""

    def saved(self, keys: Collection[int]) -> Held:
        """Returns the part that the shards saved: buckets that joined during the save may be missing."""
        start, joined = 0, []
        for count in self.joined:
            indices = [bucket.index for bucket in self.buckets[start : start + count]]
            if not all(piece.key in keys for piece in self.plan.slices if piece.bucket in indices):
                break
            start += count
            joined.append(count)
        buckets = self.buckets[:start]
        indices = [bucket.index for bucket in buckets]
        slices = tuple(piece for piece in self.plan.slices if piece.bucket in indices)
        return replace(self, buckets=buckets, plan=ShardPlan(slices), joined=tuple(joined))


class CheckpointWriter:
    """Writes checkpoints of a fleet into one directory, which the hosts of all shards must share."""

    def __init__(self, fleet: Fleet, directory: Path) -> None:
        self._fleet = fleet
        self._directory = directory

    async def save(self, look: Callable[[], Held]) -> tuple[Path, int]:
        """Writes one checkpoint.

        `look` returns what the shards hold. Buckets can join the job during the save, so it is called again
        at the end.

        In a running lockstep job, the checkpoint has a version that no key has passed
        yet. Each shard clones a key when the key reaches that version, so no worker
        waits. A stopped or asynchronous job is saved in its current state. With backup
        workers, its step is then that of the slowest key. In asynchronous modes, it is the
        lowest clock of any worker on any key.

        Returns:
            The checkpoint's folder and its step.

        Raises:
            ConfigError: A disk cannot be written, or the workers stopped before the
                step to save.
        """
        held = look()
        folder = await _in_thread(checkpoints.begin, self._directory)
        try:
            step, files = await self._write(folder, held)
            held = look().saved({key for entry in files for key in entry.keys})
            manifest = Manifest(
                held.job,
                held.mode,
                step,
                held.next_incarnation,
                held.buckets,
                held.plan.slices,
                files,
                joined=held.joined,
            )
            path = await _in_thread(checkpoints.publish, folder, manifest)
        except BaseException:
            await _in_thread(shutil.rmtree, folder, True)
            raise
        log.info("checkpoint of step %d in %s", step, path)
        return path, step

    async def _write(self, folder: Path, held: Held) -> tuple[int, tuple[FileEntry, ...]]:
        """Lets every shard write its file; returns the step and the files."""
        step, version = 0, -1
        if held.lockstep:
            holding = {piece.shard for piece in held.plan.slices}  # the other shards have no step
            stats = [each for each in await self._fleet.stats() if each.shard in holding]
            oldest, newest = min(each.oldest for each in stats), max(each.newest for each in stats)
            step, version = (newest + 1, newest + 1) if held.running else (oldest, -1)
            if not held.running and held.together and oldest != newest:
                raise ConfigError(
                    f"the job stopped between steps {oldest} and {newest}, so the shards hold no complete"
                    " step; the previous checkpoint is still the newest"
                )
        for attempt in range(ATTEMPTS):
            replies = await self._fleet.save(folder, version)
            if not any(reply.too_late for reply in replies):
                break
            # The job passed that version first: aim further ahead each time.
            step = version = max(reply.newest for reply in replies) + 2**attempt
        else:
            raise ConfigError(f"the job passed the step to save in all {ATTEMPTS} attempts; try again")
        for reply in replies:
            if reply.refused:
                raise ConfigError(reply.refused)
        if not held.lockstep:
            step = min((reply.slowest for reply in replies if reply.keys), default=0)
        return step, tuple(
            FileEntry(reply.file, reply.sha256, reply.bytes, tuple(reply.keys)) for reply in replies
        )


async def _in_thread(function: Callable[..., _T], *arguments: object) -> _T:
    """Works in a thread, because the loop must answer heartbeats. A cancellation waits for the end."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise

"""Takes a hub's checkpoints: every shard saves the same step, then the coordinator publishes the files.

A schedule saves the shards at an interval, one checkpoint at a time.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from hubring.ps.checkpoint import checkpoint_folder as checkpoints
from hubring.ps.checkpoint.checkpoint_folder import FileEntry, Manifest
from hubring.ps.coordinator.shard_fleet import Fleet
from hubring.ps.coordinator.worker_states import WorkerStates
from hubring.ps.core.errors import ConfigError, HubringError
from hubring.ps.core.timing import TimeSource

log = logging.getLogger(__name__)

_T = TypeVar("_T")

SAVE_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class CheckpointContent:
    """What the coordinator knows about the state of the shards."""

    manifest: Manifest
    """Without the step and the files, which the save brings."""
    lockstep: bool
    """Whether versions are steps."""
    together: bool
    """Whether every step is a round of every key. With backup workers, keys can close different rounds."""
    running: bool
    """Whether workers push during the save."""
    ranks: tuple[int, ...] = ()
    """The live workers."""

    def saved(self, keys: Collection[int]) -> Manifest:
        """Returns the part that the shards saved: buckets that joined during the save may be missing."""
        held, start, joined = self.manifest, 0, []
        for count in held.joined:
            end = start + count
            if not all(piece.key in keys for piece in held.slices if start <= piece.bucket < end):
                break
            start = end
            joined.append(count)
        slices = tuple(piece for piece in held.slices if piece.bucket < start)
        return replace(held, buckets=held.buckets[:start], slices=slices, joined=tuple(joined))


async def write_checkpoint(
    fleet: Fleet, states: WorkerStates, directory: Path, look: Callable[[], CheckpointContent]
) -> tuple[Path, int]:
    """Writes one checkpoint of a fleet into a directory, which the hosts of all shards must share.

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
    folder = await _in_thread(checkpoints.begin, directory)
    try:
        if held.running and not held.lockstep:
            states.ask(held.ranks)  # of a step in lockstep, the answers ask for them
        step, files = await _write_shards(fleet, folder, held)
        held = look()
        manifest = held.saved({key for entry in files for key in entry.keys})
        of_step, ranks = (step if held.lockstep else None), set(held.ranks)
        files += await states.collect(folder, of_step, lambda: ranks.intersection(look().ranks))
        path = await _in_thread(checkpoints.publish, folder, replace(manifest, step=step, files=files))
    except BaseException:
        await _in_thread(shutil.rmtree, folder, True)
        raise
    log.info("checkpoint of step %d in %s", step, path)
    return path, step


async def _write_shards(
    fleet: Fleet, folder: Path, held: CheckpointContent
) -> tuple[int, tuple[FileEntry, ...]]:
    """Lets every shard write its file; returns the step and the files."""
    step, version = 0, -1
    if held.lockstep:
        holding = {piece.shard for piece in held.manifest.slices}  # the other shards have no step
        stats = [each for each in await fleet.stats() if each.shard in holding]
        oldest, newest = min(each.oldest for each in stats), max(each.newest for each in stats)
        step, version = (newest + 1, newest + 1) if held.running else (oldest, -1)
        if not held.running and held.together and oldest != newest:
            raise ConfigError(
                f"the job stopped between steps {oldest} and {newest}, so the shards hold no complete"
                " step; the previous checkpoint is still the newest"
            )
    for attempt in range(SAVE_ATTEMPTS):
        replies = await fleet.save(folder, version)
        if not any(reply.too_late for reply in replies):
            break
        # The job passed that version first: aim further ahead each time.
        step = version = max(reply.newest for reply in replies) + 2**attempt
    else:
        raise ConfigError(f"the job passed the step to save in all {SAVE_ATTEMPTS} attempts; try again")
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


@dataclass(eq=False, repr=False)
class ScheduleState:
    """What another process needs to know of a server's checkpoints."""

    last: Path | None
    written: int = 0
    """Checkpoints that this server wrote."""
    tried_at: float = 0.0
    """When the last attempt to save ended, in monotonic seconds, or when the job began."""
    saved_at: float = 0.0
    """When the last checkpoint was written, or when the job began."""


class CheckpointSchedule(ScheduleState):
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
        held: Callable[[], CheckpointContent],
        last: Path | None,
    ) -> None:
        super().__init__(last)
        self.failure: HubringError | None = None
        """Why the job's last attempt to save failed."""
        self.states = WorkerStates(directory)
        self._fleet, self.directory = fleet, directory
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
        self.tried_at = self.saved_at = self._clock.now()

    def due(self, now: float) -> bool:
        """Returns whether it is time for the next checkpoint."""
        waited = now - self.tried_at >= self._every
        return self.directory is not None and waited and not self._saving.locked()

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._saving.locked()

    def hasten(self) -> None:
        """Makes the next checkpoint due."""
        self.tried_at = self._clock.now() - self._every

    def age(self, now: float) -> float | None:
        """Returns the seconds since the last checkpoint, or since the job began; None without checkpoints."""
        return None if self.directory is None else now - self.saved_at

    def newest(self) -> tuple[Path, Manifest] | None:
        """Returns the checkpoint from which a failed job resumes."""
        return checkpoints.newest(self.directory) if self.directory else None

    async def save(self) -> tuple[Path, int]:
        """Writes a checkpoint now; returns its folder and its step.

        Raises:
            ConfigError: There is no directory, there is nothing to save, or the save was cancelled.
        """
        if self.directory is None:
            raise ConfigError("this server writes no checkpoints; restart the server with --checkpoint-dir")
        async with self._saving:
            work = self._under_way = asyncio.create_task(
                write_checkpoint(self._fleet, self.states, self.directory, self._held)
            )
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
        if self.directory is not None:
            await self._try_to_save()

    async def _try_to_save(self) -> None:
        try:
            await self.save()
        except HubringError as error:
            newest = f"the newest checkpoint is {self.last}" if self.last else "there is no checkpoint yet"
            log.error("checkpoint failed: %s; %s", error, newest)
            self.failure = error
            self.tried_at = self._clock.now()

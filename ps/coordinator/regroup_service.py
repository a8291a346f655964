"""Where workers exchange addresses, and where a ring that heals agrees on its next generation.

Law: what one rank stores is bounded in keys and bytes, and so is the sum of all ranks. A key counts for
the rank that wrote it last.

Law: a member is lost at once if its connection has closed while the others meet because their ring broke.
It has lost its connections to the server and to the ring, so this is no failure of one network path, and
the usual grace would only delay the others. If all that came are between two steps, to let newcomers in,
the ring need not have broken, and the member keeps its grace. A member that is silent but connected has
its lease.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from hubring.ps.coordinator.agreed_model import AgreedModel
from hubring.ps.coordinator.joining import Notifier
from hubring.ps.coordinator.shard_fleet import Fleet
from hubring.ps.coordinator.shutdown import TURN_SECONDS
from hubring.ps.core.errors import ConfigError, JobFailed, UsageError
from hubring.ps.core.timing import TimeSource
from hubring.ps.core.types import Member, Sender
from hubring.ps.job.generations import MEETING, Generation, Generations
from hubring.ps.job.job import Job

Condition = Callable[[], bool]

KEY_BYTES = 256
"""Maximum bytes of a key."""
VALUE_BYTES = 64 << 10
"""Maximum bytes of a value. The longest are lists of all ranks, about 10 bytes each."""
RANK_KEYS = 1024
"""Maximum number of keys that one rank stores. An elastic job adds two for each worker that joins late."""
RANK_BYTES = 4 << 20
"""Maximum bytes that one rank stores, in keys and values."""
TOTAL_BYTES = 32 << 20
"""Maximum bytes of all ranks together."""
FOLDER_BYTES = 1 << 20
"""Maximum bytes of a folder's keys in one reply."""


@dataclass(eq=False, repr=False)
class BoardState:
    """What workers have published."""

    values: dict[str, str] = field(default_factory=dict)
    writers: dict[str, int] = field(default_factory=dict)
    """The rank that wrote each key last."""
    counts: Counter[int] = field(default_factory=Counter)
    """Keys by the rank that wrote them."""
    sizes: Counter[int] = field(default_factory=Counter)
    """Bytes by the rank that wrote them."""


class Rendezvous(BoardState):
    """Values by key, of one job.

    Args:
        notifier: Where workers wait for a value.
    """

    def __init__(self, notifier: Notifier) -> None:
        super().__init__()
        self._notifier = notifier

    async def pin(self, rank: int, key: str, value: str) -> None:
        """Stores a rank's value and wakes the workers that wait for it.

        Raises:
            UsageError: The key, the value or what the rank stores is too large.
        """
        self._check_sizes(key, value)
        self._check_room(rank, key, value)
        self.remove(key)
        self.values[key], self.writers[key] = value, rank
        self.counts[rank] += 1
        self.sizes[rank] += _entry_bytes(key, value)
        await self._notifier.announce()

    async def find(self, key: str, seconds: float, ended: Condition, ready: Condition) -> str:
        """Waits until a value is there and ready; empty after `seconds` without it, or if it has `ended`."""
        await self._notifier.wait_for(lambda: (key in self.values and ready()) or ended(), seconds)
        return self.values.get(key, "") if ready() else ""

    def folder(self, key: str) -> dict[str, str]:
        """Returns other values of the key's folder, by name; of a large folder only some.

        A member of a group reads a key of each other member, so it would otherwise need as many calls.
        """
        place = _folder_of(key)
        found: dict[str, str] = {}
        room = FOLDER_BYTES
        for other, value in self.values.items():
            if place and other != key and _folder_of(other) == place:
                room -= _entry_bytes(other, value)
                if room < 0:
                    break
                found[other.removeprefix(place)] = value
        return found

    def forget(self, folder: str) -> None:
        """Removes all keys of a folder, and of the folders in it."""
        for key in [one for one in self.values if one.startswith(f"{folder}/")]:
            self.remove(key)

    def remove(self, key: str) -> None:
        """Removes a key, if it is there."""
        if (writer := self.writers.pop(key, None)) is not None:
            self.counts[writer] -= 1
            self.sizes[writer] -= _entry_bytes(key, self.values.pop(key))

    def _check_sizes(self, key: str, value: str) -> None:
        for what, text, most in (("key", key, KEY_BYTES), ("value", value, VALUE_BYTES)):
            if (nbytes := len(text.encode())) > most:
                raise UsageError(f"a {what} of {nbytes} bytes is too large; publish at most {most} bytes")

    def _check_room(self, rank: int, key: str, value: str) -> None:
        writer = self.writers.get(key)
        replaced = _entry_bytes(key, self.values[key]) if writer is not None else 0
        keys = self.counts[rank] + (writer != rank)
        if keys > RANK_KEYS:
            raise UsageError(f"rank {rank} published {RANK_KEYS} keys, the maximum; publish under fewer keys")
        own = self.sizes[rank] - replaced * (writer == rank)
        both = (f"rank {rank}", own, RANK_BYTES), ("the workers", self.sizes.total() - replaced, TOTAL_BYTES)
        for who, others, most in both:
            if (nbytes := others + _entry_bytes(key, value)) > most:
                text = f"{who} would publish {nbytes} bytes, but the maximum is {most}"
                raise UsageError(f"{text}; publish shorter or fewer values")


def _folder_of(key: str) -> str:
    """Returns a key's folder with its last slash; empty for a key without one."""
    return "".join(key.rpartition("/")[:2])


def _entry_bytes(key: str, value: str) -> int:
    return len(key.encode()) + len(value.encode())


log = logging.getLogger(__name__)

REGROUP_LOOK_SECONDS = 0.05
"""Interval at which a meeting looks for lost members."""


class RegroupService:
    """The meetings of one job.

    Args:
        job: The job.
        fleet: The shards, which learn the members.
        notifier: Where the members wait for each other.
        clock: The source of the time.
    """

    def __init__(self, job: Job, fleet: Fleet, notifier: Notifier, clock: TimeSource) -> None:
        self._job, self._fleet, self._notifier, self._clock = job, fleet, notifier, clock

    async def regroup(
        self, sender: Sender, generation: int, note: str, seconds: float, *, boundary: bool
    ) -> Generation | None:
        """Waits for the next generation with this worker; returns None after `seconds` without one.

        Args:
            sender: The worker.
            generation: The generation that it leaves; 0 for none.
            note: For the other members.
            seconds: How long to wait.
            boundary: Whether the worker is between two steps.

        Raises:
            Fenced: The worker is no longer a member of the job.
            JobFailed: The job has failed, or is not a ring that heals.
            ConfigError: This worker cannot enter any more.
        """
        generations, membership = self._job.generations, self._job.membership
        if not generations.heals or membership is None:
            raise JobFailed("this job does not heal: start all workers with --min-workers")
        member = membership.member(sender)
        if not self._has_entered(generations, member, generation):
            generations.come(member, note, self._clock.now(), boundary=boundary)
        until = self._clock.now() + seconds
        while not self._has_entered(generations, member, generation):
            membership.member(sender)
            if self._job.failure is not None:
                raise JobFailed(str(self._job.failure))
            await self._look(generations)
            if self._has_entered(generations, member, generation):
                break
            if (left := until - self._clock.now()) <= 0:
                return None
            entered = partial(self._has_entered, generations, member, generation)
            await self._notifier.wait_for(entered, min(left, REGROUP_LOOK_SECONDS))
        return generations.current

    def has_met(self, board: Rendezvous) -> bool:
        """Returns whether a ring connects: all its workers are at the first exchange, and none was killed."""
        job, membership = self._job, self._job.membership
        if membership is not None and not membership.disconnected:
            job.exchanged |= all(f"{MEETING}/{rank}" in board.values for rank in range(job.world_size))
        return job.exchanged

    async def note_exchange(self, now: float, model: AgreedModel, board: Rendezvous) -> None:
        """Notes whether a worker lost `now` may have exchanged something, as a silent one still may.

        A lost worker's own shard cannot be asked any more. So such shards are asked all the time.
        """
        job, shards, membership = self._job, self._fleet.shards, self._job.membership
        lost = set() if membership is None else {*membership.expired(now)}
        if not job.started or job.exchanged or job.failure is not None or not (lost or job.colocated):
            return
        errors = zip(shards, await self._fleet.look(TURN_SECONDS), strict=True)
        if membership is not None and lost:
            met = job.topology == "hub" and any(member.rank in board.counts for member in lost)
            gone = {one.incarnation for one in lost}
            silent = any(why and shard.worker not in gone for shard, why in errors)
            job.exchanged = silent or met or not lost.issubset(membership.disconnected)
        stats = [shard.last_stats for shard in shards]
        repeats = not job.colocated  # a lost shard's results are gone
        steps = any(each.newest > model.step for each in stats) and model.settled  # not in a trial
        job.exchanged |= steps or any(each.collectives > each.repeatable * repeats for each in stats)
        job.exchanged |= job.colocated and (model.settled or model.trial > 0)

    async def _look(self, generations: Generations) -> None:
        """Removes lost members, and begins the next generation if no other member is awaited."""
        membership = self._job.membership
        assert membership is not None
        now = self._clock.now()
        if generations.gathering_since is not None:
            if generations.ring_broke:
                membership.end_grace()
            self._job.expire(now)
        live = frozenset(self._job.members)
        if generations.is_stranded(live):
            if self._job.finish is not None:
                raise ConfigError("this worker cannot enter the ring: the other workers have finished")
            self._job.fail(JobFailed("no worker with the state of the job is left. Restart the job"))
        if self._job.failure is not None or not generations.begin(live, now):
            return
        self._log(generations.current, generations.pause)
        for arrival in generations.current.arrivals:
            if arrival.newcomer:
                membership.activate(arrival.member.sender)
        await self._fleet.publish(self._job)
        await self._notifier.announce()

    def _log(self, generation: Generation, pause: float) -> None:
        new = [arrival.member for arrival in generation.arrivals if arrival.newcomer]
        parts = [f"lost {', '.join(map(str, generation.lost))}" if generation.lost else ""]
        parts.append(f"{', '.join(map(str, new))} entered" if new and generation.number > 1 else "")
        why = "; ".join(filter(None, parts))
        log.info(
            "ring generation %d begins with %d worker(s) (ranks %s of the job) at step %d after %.2f s%s",
            generation.number,
            len(generation.members),
            ", ".join(str(member.rank) for member in generation.members),
            self._job.step,
            pause,
            f": {why}" if why else "",
        )

    @staticmethod
    def _has_entered(generations: Generations, member: Member, generation: int) -> bool:
        return generations.current.number > generation and member in generations.current.members

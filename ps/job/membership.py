"""Which workers are members of a job.

Law: a rank has at most one holder. Each join gets a higher incarnation than every join before it, so an
incarnation always identifies one holder of a rank. A holder stays a member while it sends heartbeats
within its lease. Without an open connection its lease is only RETURN_SECONDS. A holder that waits for its
place sends no heartbeats; it asks again within JOIN_SECONDS. A worker that lost its rank must join as a new
process. The view begins when all ranks are held at once by connected workers. Later joiners enter the view
when they are activated. The epoch rises with every change of the view, and with nothing else.

The caller passes the time, in monotonic seconds. `extend_leases` adds the time in which the server
could not receive heartbeats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hubring.ps.core.errors import ConfigError, Fenced
from hubring.ps.core.types import Member, Sender, View, new_incarnation


@dataclass(frozen=True, slots=True)
class Joiner:
    """A worker that asks to join. None for `rank` or `world_size` accepts any value."""

    token: str
    job: str
    topology: str
    host: str
    pid: int
    rank: int | None = None
    world_size: int | None = None
    min_workers: int = 0
    """Members with which a ring continues after a loss; 0: a ring ends with its first loss."""
    local: bool = False
    """Whether the workers of a host exchange among themselves first."""
    brings_shard: bool = False
    """Whether the worker has started the shard that `--colocate` requires."""


NAMED_RANKS = 16
"""How many missing ranks a message lists. Every waiting worker gets the message every few seconds."""

RETURN_SECONDS = 4.0
"""How long a process whose connection closed has for its next heartbeat: perhaps only the network failed."""

SILENT_SECONDS = 4.0
"""How long a worker or a shard takes an unreachable server to be away for a moment only. A server that is
reachable but does not answer gets at least the lease, because it can recover.
"""

RETRY_SECONDS = 0.1
"""Seconds from a heartbeat that failed to the next."""

BUSY_SECONDS = 90.0
"""How long a server that is reachable may not answer a worker or a shard that joins."""

JOIN_SECONDS = 30.0
"""The shortest lease of a worker that waits for its place.

It may have to start a shard, and the shards may be slow to learn of it.
"""
MOST_DEPARTED = 1000
"""How many former holders a job remembers, so that a job that often replaces workers does not grow.

It remembers one more for each rank, because every worker that finished asks how the job ended.
"""


def heartbeat_seconds(lease_seconds: float) -> float:
    """Returns the seconds between heartbeats: several fit in a lease, so that one may be late."""
    return min(1.0, lease_seconds / 5)


def answer_seconds(lease_seconds: float) -> float:
    """Returns the seconds after which a heartbeat without a reply is repeated, as it may be lost."""
    return min(5.0, lease_seconds / 4)


class FormerMember(NamedTuple):
    """A former holder of a rank."""

    member: Member
    token: str
    why: str
    left: bool
    """Whether it left; otherwise it lost its rank."""


@dataclass(eq=False, repr=False)
class Place:
    """One holder's place."""

    member: Member
    token: str
    active: bool = False
    waits: bool = False
    """Whether the holder waits for its place."""


class Lease(Place):
    """A place, and until when it is held.

    Args:
        place: The place.
        beaten: When the holder sent its last heartbeat, or its connection opened or closed.

    Attributes:
        connected: Whether its connection is open.
    """

    def __init__(self, place: Place, beaten: float) -> None:
        super().__init__(place.member, place.token, place.active, place.waits)
        self.beaten, self.connected = beaten, True

    def expired(self, now: float, seconds: float) -> bool:
        lease = max(seconds, JOIN_SECONDS) if self.waits else seconds
        return now - self.beaten > (lease if self.connected else min(lease, RETURN_SECONDS))


@dataclass(eq=False, repr=False)
class MembershipState:
    """What another process needs to know of a membership, besides the places."""

    world_size: int
    next_incarnation: int
    complete: bool = False
    """Whether all ranks have been held at once. The job may wait for all again, but not after an exchange."""
    finished: str = ""
    """As `View.finished`."""
    epoch: int = 0
    tokens: dict[str, Member] = field(default_factory=dict)
    departed: dict[int, FormerMember] = field(default_factory=dict)
    """The last former holders, by incarnation."""


class Membership(MembershipState):
    """The holders of a job's ranks.

    Args:
        world_size: How many ranks there are: 0 to world_size - 1.
        lease_seconds: How long a holder may send no heartbeat.
        first_incarnation: The number of the first join; a restored job continues at `next_incarnation`.
    """

    def __init__(self, world_size: int, lease_seconds: float, first_incarnation: int = 1) -> None:
        super().__init__(world_size, first_incarnation)
        self.lease_seconds = lease_seconds
        self._leases: dict[int, Lease] = {}

    @property
    def places(self) -> list[Place]:
        """All holders' places."""
        return list(self._leases.values())

    def resume(self, places: Iterable[Place], now: float) -> None:
        """Takes over these places of another process. All leases begin `now`."""
        self._leases = {place.member.rank: Lease(place, now) for place in places}

    @property
    def members(self) -> tuple[Member, ...]:
        """All holders in rank order, including inactive ones."""
        return tuple(lease.member for _, lease in sorted(self._leases.items()))

    @property
    def active(self) -> tuple[int, ...]:
        """The ranks that train: not those that have joined and have no plan yet."""
        return tuple(rank for rank, lease in sorted(self._leases.items()) if lease.active)

    @property
    def disconnected(self) -> tuple[Member, ...]:
        """The holders without an open connection, in rank order."""
        return tuple(lease.member for _, lease in sorted(self._leases.items()) if not lease.connected)

    @property
    def view(self) -> View:
        """The active members at this epoch."""
        active = (lease.member for _, lease in sorted(self._leases.items()) if lease.active)
        return View(self.epoch, tuple(active), self.finished)

    def member(self, sender: Sender) -> Member:
        """Returns the member that sent a message.

        Raises:
            Fenced: The sender is no longer a member.
        """
        return self._lease_of(sender).member

    def holds(self, token: str) -> bool:
        """Returns whether this worker process got a rank, even if it lost the rank since."""
        return token in self.tokens

    def missing(self) -> list[int]:
        """Returns the ranks without a holder."""
        return [rank for rank in range(self.world_size) if rank not in self._leases]

    def absent(self) -> str:
        """Returns which workers are missing, in words."""
        ranks = self.missing()
        count = len(ranks)
        more = f" and {count - NAMED_RANKS} more" if count > NAMED_RANKS else ""
        return (
            f"{count} of {self.world_size} workers (rank{'s' if count > 1 else ''}"
            f" {', '.join(map(str, ranks[:NAMED_RANKS]))}{more} not started yet)"
        )

    def join(
        self, token: str, rank: int | None, host: str, pid: int, now: float, *, waits: bool = False
    ) -> Member:
        """Gives the worker a rank; the lowest free rank if `rank` is None.

        Args:
            token: Unique per worker process. The same token gets the same member, and a new lease.
            rank: The rank from the worker's launcher, if any.
            host: The worker's host, for messages.
            pid: The worker's process id, for messages.
            now: Monotonic seconds.
            waits: Whether the worker still waits for its place; its lease is then at least JOIN_SECONDS.

        Raises:
            ConfigError: No rank is free, or `rank` is taken or out of range.
            Fenced: This token had a rank and lost it.
        """
        if token in self.tokens:
            member = self.tokens[token]
            self.beat(member.sender, now)
            self._leases[member.rank].waits = waits
        else:
            member = Member(self.free_rank(rank), new_incarnation(self.next_incarnation), host, pid)
            self.next_incarnation += 1
            self.tokens[token] = member
            self._leases[member.rank] = Lease(Place(member, token, waits=waits), now)
        if not self.complete and len(self._leases) == self.world_size and not self.disconnected:
            self.complete = True
            self._activate(self._leases.values())
        return member

    def activate(self, sender: Sender) -> None:
        """Adds a late joiner to the view. Rounds wait for it from now on, so it must have its plan.

        Raises:
            Fenced: The joiner is no longer a member.
        """
        lease = self._lease_of(sender)
        if self.complete and not lease.active:
            self._activate([lease])

    def beat(self, sender: Sender, now: float) -> None:
        """Renews a lease.

        Raises:
            Fenced: This incarnation is no longer a member.
        """
        self._lease_of(sender).beaten = now

    def connect(self, token: str, now: float, *, connected: bool) -> None:
        """Notes that the connection of a worker process opened or closed."""
        for lease in self._leases.values():
            if lease.token == token:
                lease.beaten, lease.connected = now, connected

    def end_grace(self) -> None:
        """Ends the grace of holders whose connection closed: other members have lost them too."""
        for lease in self._leases.values():
            if not lease.connected:
                lease.beaten = -math.inf

    def extend_leases(self, seconds: float, now: float) -> None:
        """Extends all leases by `seconds`: the server could not receive a heartbeat in that time."""
        for lease in self._leases.values():
            lease.beaten = min(now, lease.beaten + seconds)

    def leave(self, sender: Sender) -> Member | None:
        """Frees the rank of a member that leaves; returns None if it has left already, as in a retry.

        Raises:
            Fenced: The sender lost its rank before.
        """
        gone = self.departed.get(sender.incarnation)
        if gone is not None and gone.left:
            return None
        member = self._lease_of(sender).member
        self._vacate({member: "it left the job"}, left=True)
        return member

    def expired(self, now: float) -> list[Member]:
        """Returns the holders whose lease expired, in rank order."""
        leases = (lease for _, lease in sorted(self._leases.items()))
        return [lease.member for lease in leases if lease.expired(now, self.lease_seconds)]

    def expire(self, now: float) -> list[Member]:
        """Frees the ranks whose lease expired; returns their holders in rank order."""
        lost = {member: self._why(self._leases[member.rank], now) for member in self.expired(now)}
        self._vacate(lost, left=False)
        return list(lost)

    def free_rank(self, rank: int | None) -> int:
        """Returns `rank`, or the lowest free rank if `rank` is None. Raises ConfigError as `join`."""
        free = self.missing()
        if rank is None and not free:
            raise ConfigError(
                f"no rank is free; the job has {self.world_size} of {self.world_size} workers:"
                f" {', '.join(map(str, self.members))}. Restart the server with --workers"
                f" {self.world_size + 1}, or wait until a worker leaves"
            )
        if rank is None:
            return free[0]
        if not 0 <= rank < self.world_size:
            raise ConfigError(
                f"rank {rank} is invalid; the job has {self.world_size} workers (ranks 0 to"
                f" {self.world_size - 1}). Restart the server with --workers {rank + 1} or more,"
                " or start the worker with a lower --rank"
            )
        if rank not in free:
            raise ConfigError(
                f"{self._leases[rank].member} already holds this rank; start this worker with another --rank,"
                f" or stop the other worker and wait {min(RETURN_SECONDS, self.lease_seconds):g} s until its"
                " rank is free"
            )
        return rank

    def _why(self, lease: Lease, now: float) -> str:
        silence = f"it sent no heartbeat for {now - lease.beaten:.1f} s"
        if not lease.connected:
            return f"its connection closed, and {silence}"
        return f"{silence} (lease: {self.lease_seconds:g} s)"

    def _lease_of(self, sender: Sender) -> Lease:
        lease = self._leases.get(sender.rank)
        if lease is not None and lease.member.incarnation == sender.incarnation:
            return lease
        held = f"; {lease.member} holds the rank now" if lease else ""
        raise Fenced(f"{self.absence(sender)}{held}. Restart the worker to rejoin")

    def absence(self, sender: Sender) -> str:
        """Returns why this worker is not a member, in words."""
        gone = self.departed.get(sender.incarnation)
        who = gone.member if gone else f"rank {sender.rank}"
        why = gone.why if gone else "this server did not admit it, or has restarted since"
        return f"{who} is not a member of the job: {why}"

    def _activate(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            lease.active = True
        self.epoch += 1

    def _vacate(self, reasons: Mapping[Member, str], *, left: bool) -> None:
        """Frees ranks. A former holder that sends another message gets its entry of `reasons`."""
        freed = [self._leases.pop(member.rank) for member in reasons]
        for lease, why in zip(freed, reasons.values(), strict=True):
            self.departed[lease.member.incarnation] = FormerMember(lease.member, lease.token, why, left)
        self.epoch += any(lease.active for lease in freed)
        while len(self.departed) > MOST_DEPARTED + self.world_size:
            oldest = self.departed.pop(next(iter(self.departed)))
            del self.tokens[oldest.token]

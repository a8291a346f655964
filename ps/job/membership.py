"""Which workers take part in a job.

Law: a place (rank) has at most one holder. Each join gets a higher incarnation
than every join before it, so whoever held a place earlier is told from who holds
it now, for good. A holder keeps its place while it beats within the lease, and
never gets a lost one back: it must join anew, as a new process. The view begins
when all places are held at once; later joiners enter it when they are activated.
The epoch rises with every change of the view, and with nothing else.

Time is what the caller says it is, in monotonic seconds. Leases run only while
somebody could hear a beat: for the rest, `excuse`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hubring.ps.core.errors import ConfigError, Fenced
from hubring.ps.core.types import Member, Sender, View


def heartbeat_seconds(lease_seconds: float) -> float:
    """How often a holder beats: several times a lease, so that one beat may be late."""
    return min(1.0, lease_seconds / 5)


@dataclass(slots=True)
class _Lease:
    member: Member
    beaten: float
    active: bool = False


class Membership:
    """The holders of a job's places.

    Args:
        world_size: How many places there are; ranks are 0 to world_size - 1.
        lease_seconds: How long a holder may be silent.
        first_incarnation: What the first join gets; a restored job goes on from `next_incarnation`.
    """

    def __init__(self, world_size: int, lease_seconds: float, first_incarnation: int = 1) -> None:
        self.world_size = world_size
        self.lease_seconds = lease_seconds
        self.next_incarnation = first_incarnation
        self.complete = False
        """All places have been held at once; stays true when workers leave later."""
        self._epoch = 0
        self._leases: dict[int, _Lease] = {}
        self._tokens: dict[str, Member] = {}
        self._departed: dict[int, tuple[Member, str]] = {}

    @property
    def members(self) -> tuple[Member, ...]:
        """All holders in rank order, also those that are not active yet."""
        return tuple(lease.member for _, lease in sorted(self._leases.items()))

    @property
    def view(self) -> View:
        """The active members, as of this epoch."""
        active = (lease.member for _, lease in sorted(self._leases.items()) if lease.active)
        return View(self._epoch, tuple(active))

    def member(self, sender: Sender) -> Member:
        """The member that a message comes from.

        Raises:
            Fenced: It has lost its place.
        """
        return self._lease_of(sender).member

    def holds(self, token: str) -> bool:
        """Whether this worker process was given a place, be it lost by now."""
        return token in self._tokens

    def missing(self) -> list[int]:
        """Ranks that nobody holds."""
        return [rank for rank in range(self.world_size) if rank not in self._leases]

    def join(self, token: str, rank: int | None, host: str, pid: int, now: float) -> Member:
        """Gives a place; the lowest free one where `rank` is None.

        Args:
            token: Drawn once per worker process: the same token gets the same member, and a new lease.
            rank: The place that the worker's launcher gave it, if any.
            host: Where the worker runs, for messages.
            pid: Its process there.
            now: Monotonic seconds.

        Raises:
            ConfigError: No place is free, or not that one.
            Fenced: This token had a place and lost it.
        """
        if token in self._tokens:
            member = self._tokens[token]
            self.beat(Sender(member.rank, member.incarnation), now)
            return member
        member = Member(self._free_place(rank), self.next_incarnation, host, pid)
        self.next_incarnation += 1
        self._tokens[token] = member
        self._leases[member.rank] = _Lease(member, beaten=now)
        if not self.complete and not self.missing():
            self.complete = True
            self._activate(self._leases.values())
        return member

    def activate(self, sender: Sender) -> None:
        """Takes a late joiner into the view: it has its plan, rounds may wait for it.

        Raises:
            Fenced: It has lost its place meanwhile.
        """
        lease = self._lease_of(sender)
        if self.complete and not lease.active:
            self._activate([lease])

    def beat(self, sender: Sender, now: float) -> None:
        """Renews a lease.

        Raises:
            Fenced: This incarnation has no place any more.
        """
        self._lease_of(sender).beaten = now

    def excuse(self, seconds: float, now: float) -> None:
        """Gives all holders this much longer: nobody could have heard them meanwhile."""
        for lease in self._leases.values():
            lease.beaten = min(now, lease.beaten + seconds)

    def leave(self, sender: Sender) -> Member | None:
        """Frees a place at its holder's wish; None if it had none, as when it says so twice."""
        lease = self._leases.get(sender.rank)
        if lease is None or lease.member.incarnation != sender.incarnation:
            return None
        self._vacate({lease.member: "it has left the job"})
        return lease.member

    def expire(self, now: float) -> list[Member]:
        """Frees the places of all whose lease has run out; returns who that was, in rank order."""
        silent = {member: now - self._leases[member.rank].beaten for member in self.members}
        lost = {
            member: f"it sent no heartbeat for {seconds:.1f} s, and its lease is {self.lease_seconds:g} s"
            for member, seconds in silent.items()
            if seconds > self.lease_seconds
        }
        self._vacate(lost)
        return list(lost)

    def _free_place(self, rank: int | None) -> int:
        free = self.missing()
        if rank is None and not free:
            raise ConfigError(
                f"all {self.world_size} places are taken, by {', '.join(map(str, self.members))};"
                f" start the server with --workers {self.world_size + 1}, or wait until one of them leaves"
            )
        if rank is None:
            return free[0]
        if not 0 <= rank < self.world_size:
            raise ConfigError(
                f"rank {rank} is outside a world of {self.world_size} (ranks 0 to {self.world_size - 1});"
                f" start the server with --workers {rank + 1} or more, or the worker with a lower --rank"
            )
        if rank not in free:
            raise ConfigError(
                f"{self._leases[rank].member} holds its place already; give this worker another --rank,"
                f" or stop that one and wait for its lease of {self.lease_seconds:g} s to run out"
            )
        return rank

    def _lease_of(self, sender: Sender) -> _Lease:
        lease = self._leases.get(sender.rank)
        if lease is not None and lease.member.incarnation == sender.incarnation:
            return lease
        gone = self._departed.get(sender.incarnation)
        who, why = gone or (
            f"rank {sender.rank}",
            "this server never gave it one, or is another server by now",
        )
        held = f"; {lease.member} holds it now" if lease else ""
        raise Fenced(f"{who} has no place in the job: {why}{held}. Start the worker again to rejoin")

    def _activate(self, leases: Iterable[_Lease]) -> None:
        for lease in leases:
            lease.active = True
        self._epoch += 1

    def _vacate(self, reasons: Mapping[Member, str]) -> None:
        """Frees places, whose holders are told `reasons` should they ever be heard again."""
        freed = [self._leases.pop(member.rank) for member in reasons]
        self._departed.update({member.incarnation: (member, why) for member, why in reasons.items()})
        self._epoch += any(lease.active for lease in freed)

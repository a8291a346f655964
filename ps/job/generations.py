"""The generations of a ring that heals.

Law: a generation has fixed members, in a fixed order. When one is lost, or newcomers wait, the others come to
a meeting. The next generation begins once every member that is left has come. Members keep their order, and
newcomers follow them, so the first member always has the job's state. Newcomers enter only if every member
came at a boundary: between two steps that all members agree on. No I/O: requests are arguments.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import Member

MEETING = "ring.meeting"
"""The folder of the board where the ranks of a ring that does not heal meet before they connect."""


class Arrival(NamedTuple):
    """A worker that has come to a meeting.

    Attributes:
        note: What it tells the other members.
        newcomer: Whether it enters.
    """

    member: Member
    note: str = ""
    boundary: bool = True
    newcomer: bool = False


class Generation(NamedTuple):
    """Members that exchange with each other.

    Attributes:
        arrivals: The members, in the order of their ranks in the ring.
        lost: Members of the generation before that are lost.
        boundary: Whether all members came at a boundary.
    """

    number: int = 0
    arrivals: tuple[Arrival, ...] = ()
    lost: tuple[Member, ...] = ()
    boundary: bool = True

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(arrival.member for arrival in self.arrivals)


@dataclass(eq=False, repr=False)
class GenerationsState:
    """What another process needs to know of a ring; those who come to a meeting come again.

    Attributes:
        least: Members that training needs; 0: the ring does not heal.
        current: The newest generation; number 0 before the first.
        pause: Seconds that the members met before the current generation.
    """

    least: int = 0
    current: Generation = Generation()  # noqa: RUF009 - it does not change
    pause: float = 0.0


class Generations(GenerationsState):
    """Decides when a ring's next generation begins, and with whom.

    Args:
        least: See `GenerationsState`.

    Attributes:
        gathering_since: When the first worker came to the meeting, in monotonic seconds; None without one.
    """

    def __init__(self, least: int = 0) -> None:
        super().__init__(least)
        self.gathering_since: float | None = None
        self._arrivals: dict[Member, Arrival] = {}

    @property
    def heals(self) -> bool:
        """Whether training continues after a loss."""
        return self.least > 0

    def check(self, least: int) -> None:
        """Checks that a joiner agrees on `least`.

        Raises:
            ConfigError: It does not.
        """
        if least != self.least:
            raise ConfigError(
                f"this worker has --min-workers {least or 'not set'}, and the job has {self.least or 'none'};"
                " start all workers with the same --min-workers"
            )

    def too_few(self, left: int) -> str:
        """Returns why the ring cannot continue with `left` workers, and the fix."""
        if not self.heals:
            return "a ring cannot continue without it. Restart the job"
        return f"{left} workers are left, and --min-workers is {self.least}. Restart the job"

    def come(self, member: Member, note: str, now: float, *, boundary: bool) -> None:
        """Notes that a worker has come to the meeting; its earlier note is replaced."""
        self._arrivals[member] = Arrival(member, note, boundary)
        if member in self.current.members and self.gathering_since is None:
            self.gathering_since = now

    def leave(self, member: Member) -> None:
        """Removes a member whose work is done, which is no loss."""
        arrivals = tuple(one for one in self.current.arrivals if one.member != member)
        self.current = self.current._replace(arrivals=arrivals)

    def broken(self, live: Collection[Member]) -> int:
        """Returns the current generation if it must end, as a member is lost or came to meet; otherwise 0."""
        members = self.current.members
        ends = any(member in self._arrivals or member not in live for member in members)
        return self.current.number if ends else 0

    def has_ended(self, generation: int, live: Collection[Member]) -> bool:
        """Whether a generation is over or must end. There is no generation 0."""
        return generation > 0 and (generation != self.current.number or self.broken(live) > 0)

    @property
    def ring_broke(self) -> bool:
        """Whether a member came within a step: its ring broke."""
        return any(
            not arrival.boundary and member in self.current.members
            for member, arrival in self._arrivals.items()
        )

    def newcomers(self, live: Collection[Member]) -> list[Member]:
        """Returns the workers that wait to enter a ring that has begun."""
        return self._outside(live) if self.current.number else []

    def _outside(self, live: Collection[Member]) -> list[Member]:
        members = self.current.members
        return [one for one in self._arrivals if one in live and one not in members]

    def awaited(self, live: Collection[Member]) -> list[Member]:
        """Returns the members that the next generation waits for."""
        expected = self.current.members or live
        return [member for member in expected if member in live and member not in self._arrivals]

    def is_stranded(self, live: Collection[Member]) -> bool:
        """Whether only newcomers are left, which have no state."""
        return bool(self.current.number) and not any(member in live for member in self.current.members)

    def begin(self, live: Collection[Member], now: float) -> bool:
        """Begins the next generation if its members have come; returns whether it does.

        Args:
            live: The job's workers.
            now: Monotonic seconds.
        """
        old = [member for member in self.current.members if member in live]
        if self.awaited(live) or (self.current.number and not old):
            return False
        boundary = all(self._arrivals[member].boundary for member in old)
        new = sorted(self._outside(live), key=attrgetter("rank")) if boundary else []
        if not old and not new:
            return False
        arrivals = [self._arrivals.pop(member) for member in old]
        arrivals += [self._arrivals.pop(member)._replace(newcomer=True) for member in new]
        lost = tuple(member for member in self.current.members if member not in live)
        self.current = Generation(self.current.number + 1, tuple(arrivals), lost, boundary)
        since, self.gathering_since = self.gathering_since, None
        self.pause = now - since if since is not None else 0.0
        return True

"""World: the state of this rank from `init` to `shutdown`.

A process has one world. A thread can enter its own world: tests that run all ranks in one process do so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from hubring.ps.core.work import Work
from hubring.workers.collectives.group import Group
from hubring.workers.communicators.base import Communicator
from hubring.workers.horovod.collectives.handles import Handles, Pending
from hubring.workers.horovod.errors import HorovodInternalError, Refused, translated
from hubring.workers.horovod.timeline import Timeline
from hubring.workers.horovod.world.hosts import Neighbourhood

Start = Callable[[str], Sequence[Work]]
"""Starts an operation under its full name; the operations of the ranks are matched by this name."""


class ElasticMembers(Protocol):
    """The part of an elastic job's membership that `init` uses."""

    def adopt(self) -> None:
        """Continues the world with the members that are left or join."""


class Members(Protocol):
    """The part of a process set that a world uses."""

    process_set_id: int | None

    @property
    def members_only(self) -> tuple[int, ...]:
        """The ranks; empty for the set of all ranks."""

    def check_included(self) -> None:
        """Raises ValueError if this process cannot use the set."""

    def forget(self) -> None:
        """Deactivates the set without an exchange with other ranks."""


@dataclass
class World:
    """The members of a job, and the running operations.

    Attributes:
        communicator: Runs the operations.
        neighbourhood: The local and cross ranks.
        members: The communicator's ranks in this world; the index is the rank that scripts see.
        group: The communicator's group of the members; None while they are all ranks.
        generation: Increases when the members change, so that names never match earlier operations.
        handles: Operations that are not synchronized yet.
        process_sets: The added process sets, by their ranks.
        timeline: Records the operations; None: no recording.
        membership: The `Membership` of `hubring.workers.horovod.elastic`; None without elastic training.
        active: Whether the world has not been shut down.
    """

    communicator: Communicator
    neighbourhood: Neighbourhood
    members: tuple[int, ...]
    group: Group | None = None
    generation: int = 0
    handles: Handles = field(default_factory=Handles)
    process_sets: dict[tuple[int, ...], Members] = field(default_factory=dict)
    timeline: Timeline | None = None
    membership: ElasticMembers | None = None
    active: bool = True
    _unnamed: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)

    @property
    def rank(self) -> int:
        return self.members.index(self.communicator.rank)

    @property
    def size(self) -> int:
        return len(self.members)

    def begin(
        self, kind: str, name: str | None, process_set: Members, start: Start, finish: Callable[[Any], Any]
    ) -> int:
        """Starts an operation, and returns its handle.

        Args:
            kind: The kind of operation; operations of different kinds can have the same name.
            name: Matches the operation across ranks; None: a counter of the operations without a name.
            process_set: The ranks that take part.
            start: Starts the exchanges.
            finish: Computes the operation's result from the result of one exchange, or the list of several.

        Raises:
            ValueError: This rank is not a member of the set, or an operation with this name is running.
            HorovodInternalError: The operation could not start.
        """
        if self.communicator.late and not self.generation:
            raise HorovodInternalError(
                "this worker joined a running job; call operations only within hvd.elastic.run"
            )
        process_set.check_included()
        full = self._full_name(kind, name, process_set)
        self.handles.check_free(full)
        with translated():
            works = list(start(full))
        if self.timeline is not None:
            self.timeline.follow(kind, full, works)
        return self.handles.add(Pending(full, works, lambda: finish(_results(works))))

    def _full_name(self, kind: str, name: str | None, process_set: Members) -> str:
        ranks = process_set.members_only
        if name is None:
            self._unnamed[kind, ranks] += 1
            name = f"noname.{self._unnamed[kind, ranks]}"
        # Disjoint sets can use the same name at the same time.
        among = f"[{','.join(map(str, ranks))}]" if ranks else ""
        since = f"{self.generation}:" if self.generation else ""
        return f"{since}{kind}.{name}{among}"

    def recount_unnamed(self) -> None:
        """Counts operations without a name from 1 again. All ranks must call this at the same point.

        After a join the ranks have made different numbers of calls.
        """
        self._unnamed.clear()

    def change_members(self, members: tuple[int, ...], generation: int) -> None:
        """Replaces the members. Running operations are dropped, and process sets must be added again."""
        self.members, self.generation = members, generation
        self.group = Group(members, self.communicator.rank, self.communicator.size)
        self.handles = Handles()
        for process_set in self.process_sets.values():
            process_set.forget()
        self.process_sets.clear()
        self.recount_unnamed()


def _results(works: Sequence[Work]) -> Any:
    results = [getattr(work, "result", None) for work in works]
    return results[0] if len(results) == 1 else results


_of_process: World | None = None
_of_thread: ContextVar[World | None] = ContextVar("world", default=None)


def enter(world: World | None, *, thread: bool = False) -> None:
    """Makes `world` the current world: in the whole process, or only in this thread."""
    global _of_process
    if thread:
        _of_thread.set(world)
    else:
        _of_process = world


def started() -> World | None:
    """Returns the current world; None without one, or after its shutdown."""
    world = latest()
    return world if world is not None and world.active else None


def latest() -> World | None:
    """Returns the current world, or the one that was shut down last; None without one."""
    return _of_thread.get() or _of_process


def current() -> World:
    """Returns the current world.

    Raises:
        Refused: `init` was not called.
    """
    world = started()
    if world is None:
        raise Refused("Horovod has not been initialized; use hvd.init().")
    return world

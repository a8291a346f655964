"""World: this rank's place among all ranks, from `init` to `shutdown`.

A process has one. A thread may enter one of its own, as tests do that run all
ranks in one process.
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
"""Begins an operation under the name that ranks are matched by."""


class Members(Protocol):
    """What a world asks of a process set."""

    process_set_id: int | None

    @property
    def members_only(self) -> tuple[int, ...]:
        """Its ranks; empty where they are all."""

    def check_included(self) -> None:
        """Refuses a call that this process has no part in."""

    def forget(self) -> None:
        """Makes it unusable where nobody is left to agree on it."""


@dataclass
class World:
    """Who takes part, and what is under way.

    Attributes:
        communicator: What carries the operations.
        neighbourhood: Who is on which host.
        members: The communicator's ranks that take part; the place in it is the rank that scripts see.
        group: The members for the communicator; None while they are all of its ranks.
        generation: Raised whenever the members change, so that no name means an operation from before.
        handles: Operations that nobody has synchronised yet.
        process_sets: Those that were added, by their ranks.
        timeline: Where operations are noted, if anywhere.
        membership: What `hubring.workers.horovod.elastic` knows of the members, under elastic training.
    """

    communicator: Communicator
    neighbourhood: Neighbourhood
    members: tuple[int, ...]
    group: Group | None = None
    generation: int = 0
    handles: Handles = field(default_factory=Handles)
    process_sets: dict[tuple[int, ...], Members] = field(default_factory=dict)
    timeline: Timeline | None = None
    membership: object = None
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
        """Begins an operation and returns its handle.

        Args:
            kind: What it is, in a word; operations of two kinds may have one name.
            name: What ranks are matched by; None: the how-manieth without a name it is.
            process_set: Who takes part.
            start: Begins the exchanges.
            finish: Makes the operation's result from theirs: from the one, or from a list of several.

        Raises:
            ValueError: This rank takes no part, or the name is taken.
            HorovodInternalError: It could not begin.
        """
        if self.communicator.late and not self.generation:
            raise HorovodInternalError(
                "this worker joined a job that was running: only what is under hvd.elastic.run lets it in"
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
        # Sets that share no rank may use one name at a time.
        among = f"[{','.join(map(str, ranks))}]" if ranks else ""
        since = f"{self.generation}:" if self.generation else ""
        return f"{since}{kind}.{name}{among}"

    def change_members(self, members: tuple[int, ...], generation: int) -> None:
        """Goes on with others; what was under way is forgotten, and process sets must be added anew."""
        self.members, self.generation = members, generation
        self.group = Group(members, self.communicator.rank, self.communicator.size)
        self.handles = Handles()
        for process_set in self.process_sets.values():
            process_set.forget()
        self.process_sets.clear()
        self._unnamed.clear()


def _results(works: Sequence[Work]) -> Any:
    results = [getattr(work, "result", None) for work in works]
    return results[0] if len(results) == 1 else results


_of_process: World | None = None
_of_thread: ContextVar[World | None] = ContextVar("world", default=None)


def enter(world: World | None, *, thread: bool = False) -> None:
    """Makes `world` the one that the functions here mean: everywhere, or in this thread alone."""
    global _of_process
    if thread:
        _of_thread.set(world)
    else:
        _of_process = world


def started() -> World | None:
    """The world, if there is one."""
    return _of_thread.get() or _of_process


def current() -> World:
    """The world that `init` made.

    Raises:
        Refused: There is none.
    """
    world = started()
    if world is None:
        raise Refused("Horovod has not been initialized; use hvd.init().")
    return world

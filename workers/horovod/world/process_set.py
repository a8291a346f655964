"""Process sets: some of the ranks, for operations that the others take no part in."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

from hubring.workers import collectives
from hubring.workers.collectives.group import Group
from hubring.workers.horovod.errors import translated
from hubring.workers.horovod.world.world import current, started


class ProcessSet:
    """Ranks that run operations together, once the set was given to `init` or `add_process_set`.

    Attributes:
        ranks: Its members, in order.
        process_set_id: Its number; None while it cannot be used.

    Raises:
        ValueError: They are no ranks.
    """

    mpi_comm = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(
                "a ProcessSet is made of a list of ranks; MPI's communicators are not known here"
            )
        ranks = list(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"a ProcessSet is made of ranks, whole numbers, but got {ranks}")
        self.ranks = sorted(ranks)
        self.process_set_id: int | None = None
        self._group: Group | None = None

    def size(self) -> int | None:
        """How many ranks it has; None before it was added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's place in it; None before it was added.

        Raises:
            ValueError: This process is outside of it.
        """
        if self.process_set_id is None:
            return None
        self.check_included()
        return self.ranks.index(current().rank)

    def included(self) -> bool:
        """Whether this process takes part."""
        return current().rank in self.ranks

    @property
    def group(self) -> Group | None:
        """Its members as the communicator knows them; None: all."""
        return self._group

    @property
    def members_only(self) -> tuple[int, ...]:
        """Its ranks; empty where they are all."""
        return tuple(self.ranks)

    def check_included(self) -> None:
        """Refuses a call that this process has no part in.

        Raises:
            ValueError: The set was not added, or does not hold this rank.
        """
        if self.process_set_id is None:
            raise ValueError(f"{self} was not added: give it to hvd.init() or hvd.add_process_set() first")
        if not self.included():
            raise ValueError(f"rank {current().rank} is no member of {self} and cannot call its operations")

    def check_root(self, root_rank: int) -> None:
        """Refuses a root outside of it.

        Raises:
            ValueError: It is no member.
        """
        if root_rank not in self.ranks:
            raise ValueError(f"root_rank is {root_rank}, but the ranks that take part are {self.ranks}")

    def begin(self, number: int) -> None:
        """Makes it usable, under this number; all ranks do so at one place of the script."""
        world = current()
        members = [world.members[rank] for rank in self.ranks]
        with translated():
            self._group = collectives.new_group(members, communicator=world.communicator)
        self.process_set_id = number

    def end(self) -> None:
        """Makes it unusable again, likewise."""
        group = self._group
        self.forget()
        if group is not None:
            with translated():
                collectives.remove_group(group, communicator=current().communicator)

    def forget(self) -> None:
        """Makes it unusable where nobody is left to agree on it."""
        self._group = self.process_set_id = None

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"


class _Everybody(ProcessSet):
    """All ranks; what they are is for the world to say."""

    def __init__(self) -> None:
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        world = started()
        return [] if world is None else list(range(world.size))

    def size(self) -> int | None:
        return current().size

    @property
    def group(self) -> Group | None:
        return current().group

    @property
    def members_only(self) -> tuple[int, ...]:
        return ()


global_process_set = _Everybody()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Makes a set of ranks usable; all ranks of the job call it, members or not, and at one place.

    Unlike Horovod's it asks no HOROVOD_DYNAMIC_PROCESS_SETS=1, which pays there for what is free here.

    Raises:
        ValueError: Such a set exists, or a rank does not.
    """
    world = current()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks = tuple(process_set.ranks)
    outside = [rank for rank in ranks if not 0 <= rank < world.size]
    if outside or not ranks or len(set(ranks)) < len(ranks):
        raise ValueError(f"{process_set}: expected different ranks from 0 to {world.size - 1}, at least one")
    if process_set.process_set_id is not None or ranks in world.process_sets or len(ranks) == world.size:
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
    taken = {other.process_set_id for other in world.process_sets.values()}
    world.process_sets[ranks] = process_set
    process_set.begin(next(number for number in count(1) if number not in taken))
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Makes a set unusable, on all ranks alike; False where it was not added, or is that of all ranks."""
    if process_set.process_set_id is None or process_set is global_process_set:
        return False
    del current().process_sets[tuple(process_set.ranks)]
    process_set.end()
    return True


def checked(process_set: Any) -> ProcessSet:
    """What a call was given as `process_set`.

    Raises:
        ValueError: It is none.
    """
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set is {process_set!r}; give a hvd.ProcessSet")
    return process_set

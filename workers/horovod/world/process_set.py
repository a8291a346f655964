"""Process sets: operations among a part of the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

from hubring.workers import collectives
from hubring.workers.collectives.group import Group
from hubring.workers.horovod.errors import translated
from hubring.workers.horovod.world.world import current, started


class ProcessSet:
    """Ranks that run operations together. Pass the set to `init` or `add_process_set` before you use it.

    Attributes:
        ranks: The members, in order.
        process_set_id: The set's number; None until the set is added.

    Raises:
        ValueError: The argument is not a list of ranks.
    """

    mpi_comm = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(
                f"ProcessSet({ranks_or_comm!r}): expected a list of ranks; Hubring has no MPI communicators"
            )
        ranks = list(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"ProcessSet({ranks}): expected a list of whole numbers")
        self.ranks = sorted(ranks)
        self.process_set_id: int | None = None
        self._group: Group | None = None

    def size(self) -> int | None:
        """Returns the number of ranks; None until the set is added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Returns this process's index in the set; None until the set is added.

        Raises:
            ValueError: This process is not a member.
        """
        if self.process_set_id is None:
            return None
        self.check_included()
        return self.ranks.index(current().rank)

    def included(self) -> bool:
        """Whether this process is a member."""
        return current().rank in self.ranks

    @property
    def group(self) -> Group | None:
        """The communicator's group of the members; None: all ranks."""
        return self._group

    @property
    def members_only(self) -> tuple[int, ...]:
        """The ranks; empty for the set of all ranks."""
        return tuple(self.ranks)

    def check_included(self) -> None:
        """Checks that this process can use the set.

        Raises:
            ValueError: The set was not added, or this rank is not a member.
        """
        if self.process_set_id is None:
            raise ValueError(f"{self} was not added; pass it to hvd.init() or hvd.add_process_set() first")
        if not self.included():
            raise ValueError(f"rank {current().rank} is not a member of {self}; only members can use the set")

    def check_root(self, root_rank: int) -> None:
        """Checks that the root is a member.

        Raises:
            ValueError: The root is not a member.
        """
        if root_rank not in self.ranks:
            raise ValueError(f"root_rank is {root_rank}; expected one of the members {self.ranks}")

    def begin(self, number: int) -> None:
        """Activates the set under this number. All ranks must call this at the same point of the script."""
        world = current()
        members = [world.members[rank] for rank in self.ranks]
        with translated():
            self._group = collectives.new_group(members, communicator=world.communicator)
        self.process_set_id = number

    def end(self) -> None:
        """Deactivates the set. All ranks must call this at the same point of the script."""
        group = self._group
        self.forget()
        if group is not None:
            with translated():
                collectives.remove_group(group, communicator=current().communicator)

    def forget(self) -> None:
        """Deactivates the set without an exchange with other ranks."""
        self._group = self.process_set_id = None

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"


class _AllRanks(ProcessSet):
    """The set of all ranks of the current world."""

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


global_process_set = _AllRanks()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Adds a process set. All ranks of the job must call this at the same point, members or not.

    Unlike Horovod, this does not need HOROVOD_DYNAMIC_PROCESS_SETS=1, since it has no cost here.

    Raises:
        ValueError: A set with these ranks exists, or a rank does not exist.
        HorovodInternalError: Ranks pass different sets, or a rank is lost or has called `join`.
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
    process_set.begin(next(number for number in count(1) if number not in taken))
    world.process_sets[ranks] = process_set
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set. All ranks must call this. Returns False for the global set or one not added."""
    if process_set.process_set_id is None or process_set is global_process_set:
        return False
    del current().process_sets[tuple(process_set.ranks)]
    process_set.end()
    return True


def checked(process_set: Any) -> ProcessSet:
    """Returns the argument `process_set`.

    Raises:
        ValueError: The argument is not a ProcessSet.
    """
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set is {process_set!r}; expected a hvd.ProcessSet")
    return process_set

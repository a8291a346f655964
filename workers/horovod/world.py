"""World: the state of this rank from `init` to `shutdown`, its place among the hosts, and process sets.

A process set is a part of the ranks that runs operations together. A process has one world. A thread can
enter its own world: tests that run all ranks in one process do so.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any, NamedTuple

from hubring.workers import collectives
from hubring.workers.collectives import Group
from hubring.workers.communicators.base import CollectiveWork, Communicator
from hubring.workers.horovod.collectives.handles import Handles, Pending, Timeline
from hubring.workers.horovod.errors import HorovodInternalError, RefusedCall, translated


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """A rank's index on its host, and the host's index among the hosts.

    Attributes:
        local_rank: Number of lower ranks on this host.
        local_size: Number of ranks on this host.
        cross_rank: Index of this host among the hosts with this local rank.
        cross_size: Number of hosts with this local rank.
        is_homogeneous: Whether every host has the same number of ranks.
    """

    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    is_homogeneous: bool = True


def neighbourhood(rank: int, hosts: Sequence[Hashable]) -> Neighbourhood:
    """Returns the neighbourhood of `rank`; `hosts` holds the host of every rank, in rank order."""
    here = hosts[rank]
    counts = Counter(hosts)
    local_rank = list(hosts[:rank]).count(here)
    # A Counter preserves the order in which hosts first appear, which is the order of their lowest ranks.
    having = [host for host, count in counts.items() if count > local_rank]
    return Neighbourhood(
        local_rank, counts[here], having.index(here), len(having), len(set(counts.values())) == 1
    )


def variables(rank: int, size: int, around: Neighbourhood) -> dict[str, str]:
    """Returns HOROVOD_RANK and the like, as `horovodrun` sets them."""
    numbers = {"rank": rank, "size": size, **asdict(around)}
    del numbers["is_homogeneous"]
    return {f"HOROVOD_{name.upper()}": str(number) for name, number in numbers.items()}


Start = Callable[..., CollectiveWork]
"""Starts an exchange from its name, which matches it across ranks, its group and its communicator."""


class OperationCall(NamedTuple):
    """What identifies an operation.

    Attributes:
        kind: The kind of operation; operations of different kinds can have the same name.
        name: Matches the operation across ranks; None: a counter of the operations without a name.
        process_set: The ranks that take part.
    """

    kind: str
    name: str | None
    process_set: ProcessSet


@dataclass
class HorovodWorld:
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
        membership: What `elastic.run` knows of the members; None without elastic training.
        active: Whether the world has not been shut down.
    """

    communicator: Communicator
    neighbourhood: Neighbourhood
    members: tuple[int, ...]
    group: Group | None = None
    generation: int = 0
    handles: Handles = field(default_factory=Handles)
    process_sets: dict[tuple[int, ...], ProcessSet] = field(default_factory=dict)
    timeline: Timeline | None = None
    membership: Any = None
    active: bool = True
    _unnamed: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)

    @property
    def rank(self) -> int:
        return self.members.index(self.communicator.rank)

    @property
    def size(self) -> int:
        return len(self.members)

    def begin(
        self, call: OperationCall, start: Start, finish: Callable[[Any], Any] = lambda result: result
    ) -> int:
        """Starts an operation, and returns its handle.

        Args:
            call: The operation.
            start: Starts the exchange.
            finish: Computes the operation's result from that of the exchange.

        Raises:
            ValueError: This rank is not a member of the set, or an operation with this name is running.
            HorovodInternalError: The operation could not start.
        """
        if self.communicator.late and not self.generation:
            raise HorovodInternalError(
                "this worker joined a running job; call operations only within hvd.elastic.run"
            )
        checked(call.process_set).check_included()
        full = self._full_name(*call)
        self.handles.check_free(full)
        called = time.perf_counter_ns()
        with translated():
            work = start(full, group=call.process_set.group, communicator=self.communicator)
        if self.timeline is not None:
            self.timeline.follow(call.kind, full, work, called)
        return self.handles.add(Pending(full, work, finish))

    def _full_name(self, kind: str, name: str | None, process_set: ProcessSet) -> str:
        ranks = () if process_set is global_process_set else tuple(process_set.ranks)
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


_of_process: HorovodWorld | None = None
_of_thread: ContextVar[HorovodWorld | None] = ContextVar("world", default=None)


def enter(world: HorovodWorld | None, *, thread: bool = False) -> None:
    """Makes `world` the current world: in the whole process, or only in this thread."""
    global _of_process
    if thread:
        _of_thread.set(world)
    else:
        _of_process = world


def started() -> HorovodWorld | None:
    """Returns the current world; None without one, or after its shutdown."""
    world = latest()
    return world if world is not None and world.active else None


def latest() -> HorovodWorld | None:
    """Returns the current world, or the one that was shut down last; None without one."""
    return _of_thread.get() or _of_process


def current() -> HorovodWorld:
    """Returns the current world.

    Raises:
        RefusedCall: `init` was not called.
    """
    world = started()
    if world is None:
        raise RefusedCall("Horovod has not been initialized; use hvd.init().")
    return world


class ProcessSet:
    """Ranks that run operations together. Pass the set to `init` or `add_process_set` before you use it.

    Attributes:
        ranks: The members, in order.
        process_set_id: The set's number; None until the set is added.
        group: The communicator's group of the members; None: all ranks.

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
        self.group: Group | None = None

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

    def check_included(self) -> None:
        """Checks that this process can use the set.

        Raises:
            ValueError: The set was not added, or this rank is not a member.
        """
        if self.process_set_id is None:
            raise ValueError(f"{self} was not added; pass it to hvd.init() or hvd.add_process_set() first")
        if not self.included():
            raise ValueError(f"rank {current().rank} is not a member of {self}; only members can use the set")

    def forget(self) -> None:
        """Deactivates the set without an exchange with other ranks."""
        self.group = self.process_set_id = None

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
    def group(self) -> Group | None:  # type: ignore[override]
        return current().group


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
    members = [world.members[rank] for rank in ranks]
    with translated():
        process_set.group = collectives.new_group(members, communicator=world.communicator)
    taken = {other.process_set_id for other in world.process_sets.values()}
    process_set.process_set_id = next(number for number in count(1) if number not in taken)
    world.process_sets[ranks] = process_set
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set. All ranks must call this. Returns False for the global set or one not added."""
    if process_set is global_process_set or process_set.group is None:
        return False
    world, group = current(), process_set.group
    del world.process_sets[tuple(process_set.ranks)]
    process_set.forget()
    with translated():
        collectives.remove_group(group, communicator=world.communicator)
    return True


def checked(process_set: Any) -> ProcessSet:
    """Returns the argument `process_set`.

    Raises:
        ValueError: The argument is not a ProcessSet.
    """
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set is {process_set!r}; expected a hvd.ProcessSet")
    return process_set

"""The members of an elastic job, on a hub and on a ring that heals. They agree in one exchange.

The rule: every member sends its id, and all members receive the same list. The hub, or the ring,
completes the exchange without lost members. The row of the lowest member says which newcomer waits, or on
a ring whether newcomers wait. Since all members receive the same list, all compute the same ranks, and
let newcomers in together.
"""

from __future__ import annotations

import logging
import secrets
import sys
import time
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from hubring.workers import collectives
from hubring.workers.horovod.elastic.notification import (
    OVER,
    UNDER_WAY,
    HostUpdateResult,
    Lives,
    NewcomerBoard,
    notification_manager,
)
from hubring.workers.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt, translated
from hubring.workers.horovod.world import HorovodWorld, current
from hubring.workers.runtime import context

log = logging.getLogger(__name__)


NO_RANK = -1


class _Row(NamedTuple):
    """What one member reports.

    Attributes:
        rank: Its rank in the job.
        life: Its id.
        newcomer: The rank for which a newcomer waits, or on a ring 0; `NO_RANK` if none waits, or if this
            member does not know.
        newcomer_life: The id of the newcomer, on a hub.
        update: Bits of `HostUpdateResult`.
        resets: Whether it returns to the last commit already.
    """

    rank: int
    life: int
    newcomer: int
    newcomer_life: int
    update: int
    resets: int


class ElasticMembership(ABC):
    """The members that one worker knows.

    Args:
        world: The world whose ranks the members become.

    Attributes:
        root: The rank from which the others get the state.
    """

    def __init__(self, world: HorovodWorld) -> None:
        self.root = 0
        self._world = world
        self._life = secrets.randbits(62)
        self._lives: Lives = {}
        self._rows: list[_Row] = []
        """What `check` has received, until `adopt` uses it."""

    @abstractmethod
    def enter(self) -> None:
        """Joins, and learns the other members. `elastic.run` calls this first."""

    def leave(self) -> None:  # noqa: B027 - a ring records nothing
        """Records that training is over. `elastic.run` calls this last."""

    @abstractmethod
    def _waiting(self) -> tuple[int, int] | None:
        """Returns rank and id of a newcomer, as in `_Row`; None if this member knows none."""

    @abstractmethod
    def _let_in(self, rows: list[_Row]) -> None:
        """Continues with these members and with the newcomer that the first row names."""

    def check(self, update: int = 0) -> None:
        """Checks for lost and new members. Every member must call this at the same point.

        Args:
            update: Bits of `HostUpdateResult`; those of the lowest member count.

        Raises:
            HorovodInternalError: A member is lost, or has returned to the last commit.
            HostsUpdatedInterrupt: A newcomer waits or there is an update, and no member is lost.
        """
        self._rows = self._gather(update)
        left = {row.life for row in self._rows}
        gone = [str(rank) for rank, life in self._lives.items() if life not in left]
        if gone:
            raise HorovodInternalError(f"lost rank(s) {', '.join(gone)} of the job")
        if any(row.resets for row in self._rows):
            raise HorovodInternalError("another worker has returned to the last commit")
        newcomer, changes = self._rows[0].newcomer, self._rows[0].update
        if newcomer != NO_RANK or changes:
            raise HostsUpdatedInterrupt(newcomer == NO_RANK and changes == HostUpdateResult.removed)
        self._rows = []

    def adopt(self) -> None:
        """Continues with the members that `check` found, or otherwise with those of a new exchange."""
        rows, self._rows = self._rows or self._gather(resets=True), []
        if rows[0].newcomer == NO_RANK:
            self._continue_with({row.rank: row.life for row in rows}, self._world.generation + 1)
        else:
            self._let_in(rows)

    def _gather(self, update: int = 0, *, resets: bool = False) -> list[_Row]:
        """Returns the rows of the members that are left, by rank."""
        world, newcomer = self._world, self._waiting() or (NO_RANK, 0)
        row = _Row(world.communicator.rank, self._life, *newcomer, update, int(resets))
        name = f"horovod.members.{world.generation}"
        with translated():
            mine = torch.tensor([row], device="cpu")
            rows = collectives.allgather(mine, name, group=world.group, communicator=world.communicator)
        return [_Row(*row) for row in rows.tolist()]

    def _continue_with(self, lives: Lives, generation: int, newcomer: int | None = None) -> None:
        """Makes these members the world. Logs it, and tells the listeners; a newcomer knows no change."""
        before, after = set(self._lives.values()), set(lives.values())
        self._lives = lives
        # A ring may have become smaller since these members answered; the next `check` finds who is lost.
        known = tuple(rank for rank in lives if rank < self._world.communicator.size)
        self._world.change_members(known, generation)
        self.root = next(place for place, rank in enumerate(lives) if rank != newcomer)
        if generation == 1:
            return
        lost = before - after
        level = logging.WARNING if lost else logging.INFO
        log.log(level, "elastic: continuing with %d worker(s), ranks %s of the job", len(lives), list(lives))
        if before and (change := HostUpdateResult.of(lost, after - before)):
            notification_manager.handle_hosts_updated(time.time(), change)


class RingMembership(ElasticMembership):
    """The members of a ring that heals. Its ranks change with the members."""

    def __init__(self, world: HorovodWorld) -> None:
        super().__init__(world)
        assert world.communicator.members is not None
        self._changing = world.communicator.members

    def enter(self) -> None:
        with translated():
            if self._world.communicator.late:
                self._changing.enter()
        self._continue_with_newcomers()

    def _waiting(self) -> tuple[int, int] | None:
        return (0, 0) if self._changing.newcomers_wait else None

    def _let_in(self, rows: list[_Row]) -> None:
        with translated():
            self._changing.let_in()
        self._continue_with_newcomers()

    def _continue_with_newcomers(self) -> None:
        mine = torch.tensor([[self._life, self._world.generation]], device="cpu")
        with translated():
            rows = collectives.allgather(mine, "horovod.entry", communicator=self._world.communicator)
            self._changing.between_steps(sys.maxsize)  # one that has just been let in may be lost
        lives, generations = zip(*rows.tolist(), strict=True)
        self._continue_with(dict(enumerate(lives)), 1 + max(generations))

    def _gather(self, update: int = 0, *, resets: bool = False) -> list[_Row]:
        rows = super()._gather(update, resets=resets)
        with translated():
            self._changing.between_steps(sys.maxsize)  # ranks change here, where all members are
        return [row._replace(rank=rank) for rank, row in enumerate(rows)]


class HubMembership(ElasticMembership):
    """The members of a job on a hub, or on a ring that does not heal. They keep their ranks.

    Args:
        world: The world whose ranks the members become.
        board: The board on which newcomers wait; None if no worker can join.
    """

    def __init__(self, world: HorovodWorld, board: NewcomerBoard | None) -> None:
        super().__init__(world)
        self._board = board
        self._known: set[int] = set()

    def enter(self) -> None:
        here, self._life = self._world.communicator, secrets.randbits(62)
        if self._board is not None and here.late:
            with translated():
                lives, generation = self._board.enter(here.rank, self._life)
            self._continue_with(lives, generation, newcomer=here.rank)
            return
        self._lives = {here.rank: self._life}
        with translated():
            if self._board is not None:
                self._board.count()
        self.adopt()
        self._tell(UNDER_WAY)

    def leave(self) -> None:
        self._tell(OVER)

    def _tell(self, training: str) -> None:
        if self._board is not None and self._is_lowest():
            with translated():
                self._board.tell(training)

    def _let_in(self, rows: list[_Row]) -> None:
        assert self._board is not None
        rank, life, generation = rows[0].newcomer, rows[0].newcomer_life, self._world.generation + 1
        lives = dict(sorted([*((row.rank, row.life) for row in rows), (rank, life)]))
        with translated():
            if self._is_lowest():
                self._board.admit(life, lives, generation)
            self._board.await_entry(life)
        self._continue_with(lives, generation, newcomer=rank)

    def _continue_with(self, lives: Lives, generation: int, newcomer: int | None = None) -> None:
        self._known |= set(lives.values())
        super()._continue_with(lives, generation, newcomer)

    def _is_lowest(self) -> bool:
        return self._world.rank == 0

    def _waiting(self) -> tuple[int, int] | None:
        if self._board is None or not self._world.generation or not self._is_lowest():
            return None
        free = [rank for rank in range(self._world.communicator.size) if rank not in self._lives]
        with translated():
            return self._board.newcomer(free, self._known)


def of_process() -> ElasticMembership:
    """Returns this worker's membership, and creates it on the first call."""
    world = current()
    if world.membership is None:
        heals = world.communicator.members is not None
        world.membership = RingMembership(world) if heals else HubMembership(world, _board(world))
    members: ElasticMembership = world.membership
    return members


def check(update: int = 0) -> None:
    """Calls `ElasticMembership.check`. Outside `elastic.run`, only this rank's `update` counts."""
    if current().membership is not None:
        of_process().check(update)
    elif update:
        raise HostsUpdatedInterrupt(update == HostUpdateResult.removed)


def root() -> int:
    """Returns the rank that has the state; 0 outside `elastic.run`."""
    return of_process().root if current().membership is not None else 0


def _board(world: HorovodWorld) -> NewcomerBoard | None:
    place = context.started()
    if place is None or place.session is None or place.communicator is not world.communicator:
        return None
    if world.communicator.topology != "hub":
        return None
    return NewcomerBoard(place.session, place.config.timeout)

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
from collections.abc import Collection
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


class _Row(NamedTuple):
    """What one member reports.

    Attributes:
        life: Its id.
        newcomers: Whether newcomers wait, as far as it knows.
        update: Bits of `HostUpdateResult`.
        resets: Whether it returns to the last commit already.
    """

    life: int
    newcomers: int
    update: int
    resets: int


class RingMembership:
    """The members that one worker knows.

    Args:
        world: The world whose ranks the members become.

    Attributes:
        root: The rank from which the others get the state.
    """

    root = 0

    def __init__(self, world: HorovodWorld) -> None:
        self._world = world
        members = world.communicator.members
        assert members is not None
        self._changing = members
        self._life = secrets.randbits(62)
        self._lives: tuple[int, ...] = ()
        self._rows: list[_Row] = []
        """What `check` has received, until `adopt` uses it."""

    def enter(self) -> None:
        """Joins, and learns the other members. `elastic.run` calls this first."""
        with translated():
            if self._world.communicator.late:
                self._changing.enter()
        self._continue_with_newcomers()

    def leave(self) -> None:
        """Records that training is over. `elastic.run` calls this last."""

    def check(self, update: int = 0) -> None:
        """Checks for lost and new members. Every member must call this at the same point.

        Args:
            update: Bits of `HostUpdateResult`; those of the first member count.

        Raises:
            HorovodInternalError: A member is lost, or has returned to the last commit.
            HostsUpdatedInterrupt: A newcomer waits or there is an update, and no member is lost.
        """
        self._rows = self._gather(update)
        lost = len(set(self._lives) - {row.life for row in self._rows})
        if lost or any(row.resets for row in self._rows):
            raise HorovodInternalError(f"lost {lost} worker(s) of the ring")
        first = self._rows[0]
        if first.newcomers or first.update:
            raise HostsUpdatedInterrupt(not first.newcomers and first.update == HostUpdateResult.removed)
        self._rows = []

    def adopt(self) -> None:
        """Continues with the members that `check` found, or otherwise with those of a new exchange."""
        rows, self._rows = self._rows or self._gather(resets=True), []
        if rows[0].newcomers:
            with translated():
                self._changing.let_in()
            self._continue_with_newcomers()
        else:
            self._continue_with(tuple(row.life for row in rows), self._world.generation + 1)

    def _continue_with_newcomers(self) -> None:
        mine = torch.tensor([[self._life, self._world.generation]], device="cpu")
        with translated():
            rows = collectives.allgather(
                mine, "horovod.entry", communicator=self._world.communicator
            ).tolist()
            self._changing.between_steps(sys.maxsize)  # one that has just been let in may be lost
        self._continue_with(tuple(life for life, _ in rows), 1 + max(generation for _, generation in rows))

    def _continue_with(self, lives: tuple[int, ...], generation: int) -> None:
        before, self._lives = self._lives, lives
        self._world.change_members(tuple(range(self._world.communicator.size)), generation)
        if before:
            _tell_change(before, lives)

    def _gather(self, update: int = 0, *, resets: bool = False) -> list[_Row]:
        """Returns the rows of the members that are left, by rank."""
        here = self._world.communicator
        mine = torch.tensor(
            [_Row(self._life, int(self._changing.newcomers_wait), update, int(resets))], device="cpu"
        )
        name = f"horovod.members.{self._world.generation}"
        with translated():
            rows = collectives.allgather(mine, name, communicator=here).tolist()
            self._changing.between_steps(sys.maxsize)  # ranks change here, where all members are
        return [_Row(*row) for row in rows]


def _tell_change(before: Collection[int], after: Collection[int], who: str = "") -> None:
    """Logs how many members continue, and tells the listeners what changed. A newcomer knows no change.

    Args:
        before: The ids of the members so far; empty for a newcomer.
        after: The ids of the members from now on.
        who: Names them.
    """
    lost, new = set(before) - set(after), set(after) - set(before)
    level = logging.WARNING if lost else logging.INFO
    log.log(level, "elastic: continuing with %d worker(s)%s", len(after), who)
    if before and (change := HostUpdateResult.of(lost, new)):
        notification_manager.handle_hosts_updated(time.time(), change)


NO_RANK = -1


class HubMembership:
    """The members that one worker knows.

    Args:
        world: The world whose ranks the members become.
        board: The board on which newcomers wait; None if no worker can join.

    Attributes:
        root: The rank from which the others get the state.
    """

    def __init__(self, world: HorovodWorld, board: NewcomerBoard | None) -> None:
        self.root = 0
        self._world = world
        self._board = board
        self._lives: Lives = {}
        self._known: set[int] = set()
        self._present: Lives | None = None
        """The members that `check` found, until `adopt` uses them."""
        self._newcomer: tuple[int, int] | None = None
        self._update = HostUpdateResult.no_update

    def enter(self) -> None:
        """Joins, and learns the other members. `elastic.run` calls this first."""
        here, life = self._world.communicator, secrets.randbits(62)
        if self._board is not None and here.late:
            with translated():
                lives, generation = self._board.enter(here.rank, life)
            self._continue_with(lives, generation, newcomer=here.rank)
            return
        self._lives = {here.rank: life}
        with translated():
            if self._board is not None:
                self._board.count()
        self.adopt()
        self._tell(UNDER_WAY)

    def leave(self) -> None:
        """Records that training is over. `elastic.run` calls this last."""
        self._tell(OVER)

    def _tell(self, training: str) -> None:
        if self._board is not None and self._is_lowest():
            with translated():
                self._board.tell(training)

    def check(self, update: int = 0) -> None:
        """Checks for lost and new members. Every member must call this at the same point.

        Args:
            update: Bits of `HostUpdateResult`; those of the lowest member count.

        Raises:
            HorovodInternalError: A member is lost.
            HostsUpdatedInterrupt: A newcomer waits or there is an update, and no member is lost.
        """
        self._present = self._gather(update)
        gone = sorted(self._lives.keys() - self._present.keys())
        if gone:
            raise HorovodInternalError(f"lost rank(s) {', '.join(map(str, gone))} of the job")
        if self._newcomer is not None or self._update:
            raise HostsUpdatedInterrupt(self._newcomer is None and self._update == HostUpdateResult.removed)
        self._present = None

    def adopt(self) -> None:
        """Continues with the members that `check` found, or otherwise with those of a new exchange."""
        lives, self._present = self._present or self._gather(), None
        newcomer, self._newcomer = self._newcomer, None
        generation = self._world.generation + 1
        if newcomer is None:
            self._continue_with(lives, generation)
            return
        rank, life = newcomer
        lives = dict(sorted({**lives, rank: life}.items()))
        self._admit(lives, generation, life)
        self._continue_with(lives, generation, newcomer=rank)

    def _admit(self, lives: Lives, generation: int, life: int) -> None:
        assert self._board is not None
        with translated():
            if self._is_lowest():
                self._board.admit(life, lives, generation)
            self._board.await_entry(life)

    def _continue_with(self, lives: Lives, generation: int, newcomer: int | None = None) -> None:
        before, self._lives = self._lives, lives
        self._known |= set(lives.values())
        self._world.change_members(tuple(lives), generation)
        self.root = next(place for place, rank in enumerate(lives) if rank != newcomer)
        if generation > 1:
            _tell_change(before.values(), lives.values(), f", ranks {list(lives)} of the job")

    def _gather(self, update: int = 0) -> Lives:
        """Returns the remaining members' ids by rank, and stores what the lowest member knows of changes."""
        world = self._world
        here = world.communicator
        waiting = self._waiting() if self._is_lowest() else None
        mine = torch.tensor(
            [[here.rank, self._lives[here.rank], *(waiting or (NO_RANK, 0)), update]], device="cpu"
        )
        name = f"horovod.members.{world.generation}"
        with translated():
            rows = collectives.allgather(mine, name, group=world.group, communicator=here)
        found = rows.tolist()
        self._newcomer = next(((rank, life) for _, _, rank, life, _ in found if rank != NO_RANK), None)
        self._update = found[0][-1]
        return {rank: life for rank, life, *_ in found}

    def _is_lowest(self) -> bool:
        return self._world.rank == 0

    def _waiting(self) -> tuple[int, int] | None:
        if self._board is None or not self._world.generation:
            return None
        free = [rank for rank in range(self._world.communicator.size) if rank not in self._lives]
        with translated():
            return self._board.newcomer(free, self._known)


Members = HubMembership | RingMembership


def of_process() -> Members:
    """Returns this worker's membership, and creates it on the first call."""
    world = current()
    if world.membership is None:
        heals = world.communicator.members is not None
        world.membership = RingMembership(world) if heals else HubMembership(world, _board(world))
    members: Members = world.membership
    return members


def check(update: int = 0) -> None:
    """Calls `Membership.check`. Outside `elastic.run`, only this rank's `update` counts."""
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

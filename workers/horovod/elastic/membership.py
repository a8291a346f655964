"""The members of an elastic job, which agree on the members in one exchange.

The rule: every member sends its rank and its id, and all members receive the same list. The hub closes the
exchange without lost members. The lowest member's row names one waiting newcomer. Since all members receive
the same list, all compute the same ranks.
"""

from __future__ import annotations

import logging
import secrets
import time

import torch

from hubring.workers import collectives
from hubring.workers.horovod.elastic.newcomers import OVER, UNDER_WAY, Board, Lives
from hubring.workers.horovod.elastic.notification import HostUpdateResult, notification_manager
from hubring.workers.horovod.elastic.ring_membership import RingMembership
from hubring.workers.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt, translated
from hubring.workers.horovod.world.world import World, current
from hubring.workers.runtime import context

log = logging.getLogger(__name__)

NO_RANK = -1


class Membership:
    """The members that one worker knows.

    Args:
        world: The world whose ranks the members become.
        board: The board on which newcomers wait; None if no worker can join.

    Attributes:
        root: The rank from which the others get the state.
    """

    def __init__(self, world: World, board: Board | None) -> None:
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
        if generation > 1:
            log.warning("elastic: continuing with %d worker(s), ranks %s of the job", len(lives), list(lives))
        change = _change(self._lives, lives) if generation > 1 else HostUpdateResult.no_update
        self._lives = lives
        self._known |= set(lives.values())
        self._world.change_members(tuple(lives), generation)
        self.root = next(place for place, rank in enumerate(lives) if rank != newcomer)
        if change:
            notification_manager.handle_hosts_updated(time.time(), change)

    def _gather(self, update: int = 0) -> Lives:
        """Returns the remaining members' ids by rank, and stores what the lowest member knows of changes."""
        world = self._world
        here = world.communicator
        waiting = self._waiting() if self._is_lowest() else None
        mine = torch.tensor([[here.rank, self._lives[here.rank], *(waiting or (NO_RANK, 0)), update]])
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


def _change(before: Lives, after: Lives) -> int:
    """Returns how the members have changed, as bits of `HostUpdateResult`. A newcomer knows no change."""
    if not before:
        return HostUpdateResult.no_update
    return HostUpdateResult.of(before.items() - after.items(), after.items() - before.items())


Members = Membership | RingMembership


def of_process() -> Members:
    """Returns this worker's membership, and creates it on the first call."""
    world = current()
    if world.membership is None:
        heals = world.communicator.heals
        world.membership = RingMembership(world) if heals else Membership(world, _board(world))
    assert isinstance(world.membership, Membership | RingMembership)
    return world.membership


def check(update: int = 0) -> None:
    """Calls `Membership.check`. Outside `elastic.run`, only this rank's `update` counts."""
    if current().membership is not None:
        of_process().check(update)
    elif update:
        raise HostsUpdatedInterrupt(update == HostUpdateResult.removed)


def root() -> int:
    """Returns the rank that has the state; 0 outside `elastic.run`."""
    return of_process().root if current().membership is not None else 0


def _board(world: World) -> Board | None:
    place = context.started()
    if place is None or place.session is None or place.communicator is not world.communicator:
        return None
    if world.communicator.topology != "hub":
        return None
    return Board(place.session, place.config.timeout)

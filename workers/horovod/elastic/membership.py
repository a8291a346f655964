"""Who takes part, as all who do agree in one exchange.

Law: every member hands in what it is, and what comes back is equal on all of
them. The hub closes that exchange without those whom it has lost. One who waits
to be let in is named by the lowest member's part. From equal answers all make
equal ranks.
"""

from __future__ import annotations

import logging
import secrets

import torch

from hubring.workers import collectives
from hubring.workers.horovod.elastic.newcomers import OVER, UNDER_WAY, Board, Lives
from hubring.workers.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt, translated
from hubring.workers.horovod.world.world import World, current
from hubring.workers.runtime import context

log = logging.getLogger(__name__)

NOBODY = -1


class Membership:
    """The members that one worker knows of.

    Args:
        world: Where they are made ranks of.
        board: Where newcomers wait; None where nobody can come.

    Attributes:
        root: The rank that has the state, for the others to get it from.
    """

    def __init__(self, world: World, board: Board | None) -> None:
        self.root = 0
        self._world = world
        self._board = board
        self._lives: Lives = {}
        self._known: set[int] = set()
        self._present: Lives | None = None
        """What `check` has seen, until `adopt` acts on it."""
        self._newcomer: tuple[int, int] | None = None

    def enter(self) -> None:
        """Takes part from now on, and learns who else does; the first thing in `elastic.run`."""
        here, life = self._world.communicator, secrets.randbits(62)
        if self._board is not None and here.late:
            with translated():
                lives, generation = self._board.come_in(here.rank, life)
            self._go_on(lives, generation, newcomer=here.rank)
            return
        self._lives = {here.rank: life}
        with translated():
            if self._board is not None:
                self._board.count()
        self.adopt()
        self._tell(UNDER_WAY)

    def leave(self) -> None:
        """Training is over; the last thing in `elastic.run`."""
        self._tell(OVER)

    def _tell(self, training: str) -> None:
        if self._board is not None and self._is_lowest():
            with translated():
                self._board.tell(training)

    def check(self) -> None:
        """Compares who takes part with who did; every member calls it at the same point.

        Raises:
            HorovodInternalError: Somebody is gone.
            HostsUpdatedInterrupt: Somebody has come, and nobody is gone.
        """
        self._present = self._gather()
        gone = sorted(self._lives.keys() - self._present.keys())
        if gone:
            raise HorovodInternalError(f"rank(s) {', '.join(map(str, gone))} of the job are gone")
        if self._newcomer is None:
            self._present = None
            return
        raise HostsUpdatedInterrupt

    def adopt(self) -> None:
        """Goes on with those who take part: as `check` saw them, else as they say now."""
        lives, self._present = self._present or self._gather(), None
        newcomer, self._newcomer = self._newcomer, None
        generation = self._world.generation + 1
        if newcomer is None:
            self._go_on(lives, generation)
            return
        rank, life = newcomer
        lives = dict(sorted({**lives, rank: life}.items()))
        self._let_in(lives, generation, life)
        self._go_on(lives, generation, newcomer=rank)

    def _let_in(self, lives: Lives, generation: int, life: int) -> None:
        assert self._board is not None
        with translated():
            if self._is_lowest():
                self._board.admit(life, lives, generation)
            self._board.await_entry(life)

    def _go_on(self, lives: Lives, generation: int, newcomer: int | None = None) -> None:
        if generation > 1:
            log.warning("elastic: going on with %d worker(s), ranks %s of the job", len(lives), list(lives))
        self._lives = lives
        self._known |= set(lives.values())
        self._world.change_members(tuple(lives), generation)
        self.root = next(place for place, rank in enumerate(lives) if rank != newcomer)

    def _gather(self) -> Lives:
        """Every member's life by its rank, of those who are left; notes whom the lowest has seen waiting."""
        world = self._world
        here = world.communicator
        seen = self._seen() if self._is_lowest() else None
        mine = torch.tensor([[here.rank, self._lives[here.rank], *(seen or (NOBODY, 0))]])
        name = f"horovod.members.{world.generation}"
        with translated():
            rows = collectives.allgather(mine, name, group=world.group, communicator=here)
        found = rows.tolist()
        self._newcomer = next(((rank, life) for *_, rank, life in found if rank != NOBODY), None)
        return {rank: life for rank, life, *_ in found}

    def _is_lowest(self) -> bool:
        return self._world.rank == 0

    def _seen(self) -> tuple[int, int] | None:
        if self._board is None or not self._world.generation:
            return None
        free = [rank for rank in range(self._world.communicator.size) if rank not in self._lives]
        with translated():
            return self._board.newcomer(free, self._known)


def of_process() -> Membership:
    """The membership of this worker; made where there is none yet."""
    world = current()
    if world.membership is None:
        world.membership = Membership(world, _board(world))
    assert isinstance(world.membership, Membership)
    return world.membership


def check() -> None:
    """As `Membership.check`; nothing outside of `elastic.run`."""
    if current().membership is not None:
        of_process().check()


def root() -> int:
    """The rank that has the state; 0 outside of `elastic.run`."""
    return of_process().root if current().membership is not None else 0


def _board(world: World) -> Board | None:
    place = context.started()
    if place is None or place.session is None or place.communicator is not world.communicator:
        return None
    if world.communicator.topology != "hub":
        return None
    return Board(place.session, place.config.timeout)

"""The members of an elastic job on a ring that heals: those of the ring's current generation.

The rule: every member sends its id, and all members receive the same list. The ring runs the exchange without
lost members. The first member's row says whether newcomers wait; all members then let them in together.
"""

from __future__ import annotations

import logging
import secrets
import sys
import time
from typing import NamedTuple

import torch

from hubring.workers import collectives
from hubring.workers.horovod.elastic.notification import HostUpdateResult, notification_manager
from hubring.workers.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt, translated
from hubring.workers.horovod.world.world import World

log = logging.getLogger(__name__)


class _Row(NamedTuple):
    """What one member says.

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

    def __init__(self, world: World) -> None:
        self._world = world
        self._life = secrets.randbits(62)
        self._lives: tuple[int, ...] = ()
        self._rows: list[_Row] = []
        """What `check` has received, until `adopt` uses it."""

    def enter(self) -> None:
        """Joins, and learns the other members. `elastic.run` calls this first."""
        with translated():
            if self._world.communicator.late:
                self._world.communicator.enter()
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
                self._world.communicator.let_in()
            self._continue_with_newcomers()
        else:
            self._continue_with(tuple(row.life for row in rows), self._world.generation + 1)

    def _continue_with_newcomers(self) -> None:
        mine = torch.tensor([[self._life, self._world.generation]])
        with translated():
            rows = collectives.allgather(
                mine, "horovod.entry", communicator=self._world.communicator
            ).tolist()
            self._world.communicator.between_steps(sys.maxsize)  # one that has just been let in may be lost
        self._continue_with(tuple(life for life, _ in rows), 1 + max(generation for _, generation in rows))

    def _continue_with(self, lives: tuple[int, ...], generation: int) -> None:
        before, self._lives = set(self._lives), lives
        size = self._world.communicator.size
        self._world.change_members(tuple(range(size)), generation)
        if not before:
            return
        log.warning("elastic: continuing with %d worker(s)", size)
        if change := HostUpdateResult.of(before - set(lives), set(lives) - before):
            notification_manager.handle_hosts_updated(time.time(), change)

    def _gather(self, update: int = 0, *, resets: bool = False) -> list[_Row]:
        """Returns the rows of the members that are left, by rank."""
        here = self._world.communicator
        mine = torch.tensor([_Row(self._life, int(here.newcomers_wait), update, int(resets))])
        name = f"horovod.members.{self._world.generation}"
        with translated():
            rows = collectives.allgather(mine, name, communicator=here).tolist()
            here.between_steps(sys.maxsize)  # ranks change here, where all members are
        return [_Row(*row) for row in rows]

"""How a new worker joins a running job: notes on the hub's board.

    newcomer   waiting.RANK = LIFE    a newcomer with the id LIFE waits for RANK
    lowest     admit.LIFE = members   the newcomer is admitted; these are the members
    newcomer   entered.LIFE           the hub counts the newcomer; rounds can wait for it
    lowest     training = over        no worker can join

A newcomer enters only after the members admit it and wait for it. Otherwise rounds would wait for a worker
that does not know of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

from hubring.ps.client.session import Session
from hubring.ps.core.errors import ConfigError, DeadlineExceeded
from hubring.ps.core.types import Slicing
from hubring.ps.job.sharding import SLICE_BYTES

ENTER_SECONDS = 60.0
"""How long the members wait for an admitted newcomer."""

LOOK_SECONDS = 2.0
UNDER_WAY, OVER = "under way", "over"

Lives = dict[int, int]
"""Rank in the job to the id of the worker. A restarted worker has a new id."""


class Board:
    """One worker's view of the board.

    Args:
        session: The worker's session with the hub.
        timeout: Seconds that a newcomer waits for admission.
    """

    def __init__(self, session: Session, timeout: float) -> None:
        self._session = session
        self._timeout = timeout

    def count(self) -> None:
        """Makes the hub count this worker. For a late worker this needs the job's plan; here it is empty."""
        self._session.plan((), Slicing(SLICE_BYTES))

    def tell(self, training: str) -> None:
        """Publishes whether training is under way or over."""
        self._session.board.publish("horovod.training", training)

    def newcomer(self, ranks: Iterable[int], known: Iterable[int]) -> tuple[int, int] | None:
        """Returns the rank and id of a waiting newcomer; None without one.

        Args:
            ranks: The free ranks.
            known: The ids of workers that were admitted before.
        """
        for rank in ranks:
            with suppress(DeadlineExceeded):
                life = int(self._session.board.lookup(f"horovod.waiting.{rank}", 0.001))
                if life not in known:
                    return rank, life
        return None

    def admit(self, life: int, members: Mapping[int, int], generation: int) -> None:
        """Admits a newcomer."""
        pairs = " ".join(f"{rank}:{one}" for rank, one in members.items())
        self._session.board.publish(f"horovod.admit.{life}", f"{generation} {pairs}")

    def await_entry(self, life: int) -> None:
        """Returns once the hub counts the newcomer.

        Raises:
            DeadlineExceeded: The newcomer did not enter in time.
        """
        self._session.board.lookup(f"horovod.entered.{life}", ENTER_SECONDS)

    def enter(self, rank: int, life: int) -> tuple[Lives, int]:
        """Waits for admission, enters, and returns the members and their generation.

        Raises:
            DeadlineExceeded: The members did not admit this worker in time.
            ConfigError: Training is over.
        """
        self._session.board.publish(f"horovod.waiting.{rank}", str(life))
        generation, *members = self._await_admission(life).split()
        self.count()
        self._session.board.publish(f"horovod.entered.{life}", "yes")
        pairs = (one.split(":") for one in members)
        return {int(member): int(one) for member, one in pairs}, int(generation)

    def _await_admission(self, life: int) -> str:
        deadline = time.monotonic() + self._timeout
        while (left := deadline - time.monotonic()) > 0:
            with suppress(DeadlineExceeded):
                return self._session.board.lookup(f"horovod.admit.{life}", min(left, LOOK_SECONDS))
            if self._session.board.lookup("horovod.training", self._timeout) == OVER:
                raise ConfigError("this worker cannot join: training is over")
        raise DeadlineExceeded(
            f"the other workers did not admit this worker within {self._timeout:g} s (--timeout);"
            " they must call commit() or check_host_updates()"
        )

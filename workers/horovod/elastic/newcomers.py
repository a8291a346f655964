"""How a worker that comes asks to take part, and is let in: notes on the hub's board.

    newcomer   waiting.RANK = LIFE    I am here
    lowest     admit.LIFE = members   you are one of these from now on
    newcomer   entered.LIFE           the hub counts me; rounds may wait for me
    lowest     training = over        nobody is let in any more

A newcomer enters only when the others are about to wait for it: had it entered
before, their rounds would have waited for one who knows nothing of them.
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
"""How long the members wait for one whom they let in."""

LOOK_SECONDS = 2.0
UNDER_WAY, OVER = "under way", "over"

Lives = dict[int, int]
"""Who takes part: a number that is each worker's own, by the job's rank."""


class Board:
    """One worker's view of the board.

    Args:
        session: Its place in the job.
        timeout: Seconds that a newcomer waits to be let in.
    """

    def __init__(self, session: Session, timeout: float) -> None:
        self._session = session
        self._timeout = timeout

    def count(self) -> None:
        """Makes the hub count this worker: for whoever comes late that takes the job's plan, an empty one."""
        self._session.plan((), Slicing(SLICE_BYTES))

    def tell(self, training: str) -> None:
        """Says whether training is under way or over."""
        self._session.publish("horovod.training", training)

    def newcomer(self, ranks: Iterable[int], known: Iterable[int]) -> tuple[int, int] | None:
        """Rank and life of one who waits in a free place, if there is one.

        Args:
            ranks: The places where nobody is.
            known: Lives that were let in already.
        """
        for rank in ranks:
            with suppress(DeadlineExceeded):
                life = int(self._session.lookup(f"horovod.waiting.{rank}", 0.001))
                if life not in known:
                    return rank, life
        return None

    def admit(self, life: int, members: Mapping[int, int], generation: int) -> None:
        """Lets a newcomer in."""
        told = " ".join(f"{rank}:{one}" for rank, one in members.items())
        self._session.publish(f"horovod.admit.{life}", f"{generation} {told}")

    def await_entry(self, life: int) -> None:
        """Returns once the hub counts the newcomer.

        Raises:
            DeadlineExceeded: It did not come.
        """
        self._session.lookup(f"horovod.entered.{life}", ENTER_SECONDS)

    def come_in(self, rank: int, life: int) -> tuple[Lives, int]:
        """Asks to take part and waits until that is granted; returns the members and their generation.

        Raises:
            DeadlineExceeded: Nobody let this worker in: the others never commit, say.
            ConfigError: Their training is over.
        """
        self._session.publish(f"horovod.waiting.{rank}", str(life))
        generation, *told = self._await_admission(life).split()
        self.count()
        self._session.publish(f"horovod.entered.{life}", "yes")
        pairs = (one.split(":") for one in told)
        return {int(member): int(one) for member, one in pairs}, int(generation)

    def _await_admission(self, life: int) -> str:
        deadline = time.monotonic() + self._timeout
        while (left := deadline - time.monotonic()) > 0:
            with suppress(DeadlineExceeded):
                return self._session.lookup(f"horovod.admit.{life}", min(left, LOOK_SECONDS))
            if self._session.lookup("horovod.training", self._timeout) == OVER:
                raise ConfigError("the others' training is over: this worker came too late")
        raise DeadlineExceeded(
            f"nobody let this worker in within {self._timeout:g} s: the others never commit"
        )

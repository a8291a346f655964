"""Members of a ring that heals, as threads of this process, with the server's rules and no server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import partial
from itertools import count
from typing import Any

from hubring.ps.client.rendezvous import RingGeneration, RingMember
from hubring.ps.core.errors import JobFailed
from hubring.ps.core.types import Member
from hubring.ps.job.generations import Generations
from hubring.workers.communicators.ring.healing.generations import RingMeeting
from hubring.workers.communicators.ring.healing.healing_ring import HealingRing
from tests.support.training.notes import SharedNotes
from tests.support.training.ranks import LIMIT


class HealingRanks:
    """A ring that heals, with the server's generations.

    Args:
        size: Members of the first generation.
        compress: As for `RingMeeting`.

    Attributes:
        backend: As for `RingMeeting`.
        hosts: As for `RingRanks`.
    """

    backend: str | None = None
    hosts: str = ""

    def __init__(self, size: int, compress: str = "") -> None:
        self.size = size
        self.compress = compress
        self.rings: dict[int, HealingRing] = {}
        self.notes = SharedNotes()
        self._generations = Generations(1)
        self._changed = threading.Condition()
        self._incarnations = count(1)
        self.live = {rank: self._member(rank) for rank in range(size)}
        self._started, self._newcomer_came = threading.Event(), threading.Event()

    def _member(self, rank: int) -> Member:
        return Member(rank, next(self._incarnations))

    def join(self, rank: int, *, late: bool = False) -> HealingRing:
        """Makes a member's ring; a newcomer waits for `release`."""
        if late:
            assert self._started.wait(LIMIT)
        with self._changed:
            if late:
                self.live[rank] = self._member(rank)
            size = len(self._generations.current.members)
        board = copy(self.notes)  # the notes of all; only the way to the meetings is one member's
        board.regroup = partial(self.regroup, rank)  # type: ignore[method-assign]
        meeting = RingMeeting(
            *(rank, "127.0.0.1", board),
            backend=self.backend,
            compress=self.compress,
            timeout=LIMIT,
            local=self.hosts[rank : rank + 1],
        )
        ring = HealingRing(meeting, late=late, size=size, timeout=LIMIT)
        with self._changed:
            self.rings[rank] = ring
            self._changed.notify_all()
        return ring

    def newcomers(self) -> bool:
        with self._changed:
            return bool(self._generations.newcomers(self.live.values()))

    def release(self) -> None:
        """Lets newcomers join."""
        self._started.set()

    def await_newcomer(self) -> None:
        """Waits until a newcomer has come, even if it has entered or is lost since."""
        assert self._newcomer_came.wait(LIMIT)

    def lose(self, rank: int) -> None:
        """Ends a member as a kill does: its connections close, and the server notices.

        It waits until all members have a ring. They must not meet without it, and must hear of the loss.
        """
        with self._changed:
            assert self._changed.wait_for(lambda: self.rings.keys() >= self.live.keys(), LIMIT), self.rings
            del self.live[rank]
            self._changed.notify_all()
        self.rings[rank].close(finished=False)

    def finish(self, rank: int) -> None:
        """Ends a member whose work is done, as the end of its script does."""
        with self._changed:
            self._generations.leave(self.live.pop(rank))
            self._changed.notify_all()
        self.rings[rank].close(finished=True)

    def beat(self) -> None:
        """Tells all members what the server tells them with a heartbeat."""
        with self._changed:
            waits = self.newcomers()
            for ring in list(self.rings.values()):
                ring.hear(self._generations.broken(self.live.values()), newcomers=waits)
            if waits:
                self._newcomer_came.set()

    def regroup(self, rank: int, generation: int, note: str, boundary: bool) -> RingGeneration:
        with self._changed:
            member, all_ = self.live.get(rank), self._generations
            if member is None:
                raise JobFailed(f"rank {rank} is lost")
            all_.come(member, note, 0.0, boundary=boundary)
            self._changed.notify_all()
            self.beat()

            def entered() -> bool:
                live = [self.live[one] for one in sorted(self.live)]
                if all_.begin(live, 0.0):
                    self._changed.notify_all()
                here = all_.current.number > generation and member in all_.current.members
                return here or rank not in self.live

            assert self._changed.wait_for(entered, LIMIT), "the members did not meet"
            if rank not in self.live:
                raise JobFailed(f"rank {rank} is lost")
            current = all_.current
            members = (RingMember(one.member.rank, one.note, one.newcomer) for one in current.arrivals)
            return RingGeneration(current.number, tuple(members), current.boundary)


Live = Callable[[HealingRing], Any]


def together(ranks: HealingRanks, live: Live, *late: int) -> list[Any]:
    """Runs every member on a thread, and returns the results in rank order; None for a lost member."""

    def run(rank: int, *, late: bool) -> Any:
        ring = ranks.join(rank, late=late)
        try:
            result = live(ring)
        except BaseException:
            ring.close(finished=False)
            raise
        if rank in ranks.live:
            ranks.finish(rank)
        return result

    with ThreadPoolExecutor(ranks.size + len(late)) as pool:
        futures: list[Future[Any]] = [pool.submit(run, rank, late=False) for rank in range(ranks.size)]
        futures += [pool.submit(run, rank, late=True) for rank in late]
        return [future.result(LIMIT) for future in futures]

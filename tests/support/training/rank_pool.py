"""Ranks that stay connected for many collectives, each on its own thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from hubring.workers.communicators.base import Communicator
from tests.support.training.ranks import LIMIT, GlooRingRanks, HubRanks, LocalRanks, Ranks, RingRanks

T = TypeVar("T")


class RankPool:
    """All ranks of one kind of communicator, until `close`."""

    def __init__(self, topology: str, size: int) -> None:
        kinds: dict[str, type[Ranks]] = {"hub": HubRanks, "ring": RingRanks, "local": LocalRanks}
        kind = (kinds | {"ring gloo": GlooRingRanks})[topology]
        self.size = size
        # The size of the class determines the ranks.
        self._meeting = type(f"{size} on the {topology}", (kind,), {"size": size})()
        self._pool = ThreadPoolExecutor(size)
        self.communicators = list(self._pool.map(self._meeting.join, range(size)))

    def run(self, action: Callable[[Communicator], T]) -> list[T]:
        """Runs `action` once per rank; returns the results in rank order."""
        futures = [self._pool.submit(action, communicator) for communicator in self.communicators]
        return [future.result(LIMIT) for future in futures]

    def close(self) -> None:
        self.run(lambda communicator: communicator.close(finished=True))
        self._pool.shutdown()
        self._meeting.close()

"""Horovod's functions on all ranks of one process, each on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from hubring.workers.communicators.base import Communicator
from hubring.workers.horovod.world import lifecycle
from hubring.workers.launchers.placement import Placement
from tests.support.training.ranks import HubRanks, Ranks, RingRanks

T = TypeVar("T")


class Hub(HubRanks):
    size = 2


class Ring(RingRanks):
    size = 2


class Hub3(HubRanks):
    size = 3


class Ring3(RingRanks):
    size = 3


class Everybody:
    """Runs one function on all ranks at once."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.size = ranks.size

    def __call__(self, action: Callable[[], T]) -> list[T]:
        """What each rank returned, in rank order; or the first one's error."""

        def live(communicator: Communicator) -> T:
            lifecycle.begin(communicator, Placement(), thread=True)
            return action()

        return self.ranks.run(live)


def everybody(kind: type[Ranks]) -> Iterator[Everybody]:
    ranks = kind()
    yield Everybody(ranks)
    ranks.close()


@pytest.fixture(params=[Hub, Ring], ids=["hub", "ring"])
def on_two(request: pytest.FixtureRequest) -> Iterator[Everybody]:
    yield from everybody(request.param)


@pytest.fixture(params=[Hub3, Ring3], ids=["hub", "ring"])
def on_three(request: pytest.FixtureRequest) -> Iterator[Everybody]:
    yield from everybody(request.param)

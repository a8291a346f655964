"""Horovod's functions on all ranks of one process, each on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, update_wrapper
from inspect import Parameter, Signature, signature
from typing import Any, TypeVar

import pytest

from hubring.workers.communicators.base import Communicator
from hubring.workers.horovod import basics
from hubring.workers.launchers.placement import Placement
from tests.support.training.ranks import HubRanks, Ranks, RingRanks

T = TypeVar("T")


class Everybody:
    """Runs one function on all ranks at once."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.size = ranks.size

    def __call__(self, action: Callable[[], T]) -> list[T]:
        """What each rank returned, in rank order; or the first one's error."""

        def live(communicator: Communicator) -> T:
            basics.begin(communicator, Placement(), thread=True)
            return action()

        return self.ranks.run(live)


def every_rank(test: Callable[..., None], ranks: str = "on_two") -> Callable[..., None]:
    """Runs the body of a test on all ranks at once, on a hub and around a ring."""

    def run(**given: Any) -> None:
        given.pop(ranks)(partial(test, **given))

    names = [ranks, *signature(test).parameters]
    run.__signature__ = Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in names])  # type: ignore[attr-defined]  # which pytest reads
    return update_wrapper(run, test, updated=())


every_rank_of_three = partial(every_rank, ranks="on_three")


def everybody(kind: type[Ranks], size: int) -> Iterator[Everybody]:
    ranks: Ranks = type(kind.__name__, (kind,), {"size": size})()
    yield Everybody(ranks)
    ranks.close()


@pytest.fixture(params=[HubRanks, RingRanks], ids=["hub", "ring"])
def on_two(request: pytest.FixtureRequest) -> Iterator[Everybody]:
    yield from everybody(request.param, 2)


@pytest.fixture(params=[HubRanks, RingRanks], ids=["hub", "ring"])
def on_three(request: pytest.FixtureRequest) -> Iterator[Everybody]:
    yield from everybody(request.param, 3)

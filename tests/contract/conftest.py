"""Ranks of every kind, for tests that hold on all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from tests.contract.numbers import SIZES
from tests.support.training.crew import Crew
from tests.support.training.ranks import (
    AggregatingRanks,
    HubRanks,
    LocalRanks,
    PlacedAggregatingRanks,
    PlacedRanks,
    Ranks,
    RingRanks,
    StagedAggregatingRanks,
    StagedRanks,
)

ALL: dict[str, type[Ranks]] = {
    "local": LocalRanks,
    "ring": RingRanks,
    "hub": HubRanks,
    "aggregate": AggregatingRanks,
    "staged": StagedRanks,
    "staged aggregate": StagedAggregatingRanks,
    "placed": PlacedRanks,
    "placed aggregate": PlacedAggregatingRanks,
}


AVERAGING = ["local", "ring", "aggregate", "staged aggregate", "placed aggregate"]


def made(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = ALL[request.param]()
    yield ranks
    ranks.close()


ranks = pytest.fixture(made, params=list(ALL), name="ranks")
averaging = pytest.fixture(made, params=AVERAGING, name="averaging")
several = pytest.fixture(made, params=["ring", "hub"], name="several")
ring = pytest.fixture(made, params=["ring"], name="ring")
hub = pytest.fixture(made, params=["hub"], name="hub")


@pytest.fixture(scope="module")
def crews() -> Iterator[Callable[[str, int], Crew]]:
    made: dict[tuple[str, int], Crew] = {}

    def crew(topology: str, size: int) -> Crew:
        if (topology, size) not in made:
            made[topology, size] = Crew(topology, size)
        return made[topology, size]

    yield crew
    for one in made.values():
        one.close()


@pytest.fixture(
    params=list(itertools.product(["hub", "ring"], SIZES)), ids=lambda which: f"{which[0]}{which[1]}"
)
def crew(request: pytest.FixtureRequest, crews: Callable[[str, int], Crew]) -> Crew:
    return crews(*request.param)


@pytest.fixture(params=["hub3", "ring3"])
def three(request: pytest.FixtureRequest, crews: Callable[[str, int], Crew]) -> Crew:
    return crews(request.param[:-1], 3)

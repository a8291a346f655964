"""Ranks of every kind, for tests that hold on all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from tests.contract.numbers import SIZES
from tests.support.training.rank_pool import RankPool
from tests.support.training.ranks import (
    AggregatingRanks,
    GlooRingRanks,
    HubRanks,
    LocalRanks,
    PlacedAggregatingRanks,
    PlacedRanks,
    Ranks,
    RingRanks,
    StagedAggregatingRanks,
    StagedRanks,
    TwoLevelRanks,
    TwoLevelRingRanks,
)

ALL: dict[str, type[Ranks]] = {
    "local": LocalRanks,
    "ring": RingRanks,
    "ring gloo": GlooRingRanks,
    "ring two levels": TwoLevelRingRanks,
    "hub": HubRanks,
    "aggregate": AggregatingRanks,
    "hub two levels": TwoLevelRanks,
    "staged": StagedRanks,
    "staged aggregate": StagedAggregatingRanks,
    "placed": PlacedRanks,
    "placed aggregate": PlacedAggregatingRanks,
}


def made(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = ALL[request.param]()
    yield ranks
    ranks.close()


ranks = pytest.fixture(made, params=list(ALL), name="ranks")
basic = pytest.fixture(made, params=["local", "ring", "ring gloo", "hub", "aggregate"], name="basic")
ring = pytest.fixture(made, params=["ring", "ring gloo", "ring two levels"], name="ring")


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[str, int], RankPool]]:
    made: dict[tuple[str, int], RankPool] = {}

    def pool(topology: str, size: int) -> RankPool:
        if (topology, size) not in made:
            made[topology, size] = RankPool(topology, size)
        return made[topology, size]

    yield pool
    for one in made.values():
        one.close()


@pytest.fixture(
    params=[("local", 1), *itertools.product(["hub", "ring"], SIZES), ("ring gloo", 3)],
    ids=lambda which: f"{which[0]}{which[1]}",
)
def pool(request: pytest.FixtureRequest, pools: Callable[[str, int], RankPool]) -> RankPool:
    return pools(*request.param)


@pytest.fixture(params=["hub3", "ring3", "ring gloo3"])
def three(request: pytest.FixtureRequest, pools: Callable[[str, int], RankPool]) -> RankPool:
    return pools(request.param[:-1], 3)

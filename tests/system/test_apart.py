"""Ranks that part: each is in another operation, or only one of them runs `backward`."""

from __future__ import annotations

import re

import pytest

from hubring.ps.core.errors import ConfigError
from tests.support.processes.cluster import SCRIPTS, Cluster
from tests.support.processes.stopwatch import Stopwatch

pytestmark = pytest.mark.slow

APART = str(SCRIPTS / "apart.py")
FLAGS = {"hub": (), "aggregate": ("--aggregate",), "ring": ("--topology", "ring")}
STEP = r"in the exchange of gradients \(apart\.py:\d+: (optimizer\.step\(\)|loss_of\(.*\)\.backward\(\))\)"
BARRIER = r"in barrier 'barrier' \(apart\.py:\d+: .*\)"
WRAPS = r"in .* \(apart\.py:\d+: .*DistributedOptimizer.*\)"
SOON = 60.0
"""Stopwatch seconds, of 300 after which the wait itself would end."""


@pytest.mark.parametrize(
    ("topology", "kind", "first", "second"),
    [
        pytest.param("hub", "barrier", STEP, BARRIER, marks=pytest.mark.full),
        ("ring", "names", "in allreduce 'sum 0'.*", "in allreduce 'sum 1'"),
        pytest.param("ring", "loop", STEP, BARRIER, marks=pytest.mark.full),
        pytest.param("aggregate", "optimizer", WRAPS, BARRIER, marks=pytest.mark.full),
    ],
)
def test_ranks_in_different_operations_are_named_and_end(
    cluster: Cluster, topology: str, kind: str, first: str, second: str
) -> None:
    _, address = cluster.server("--workers", "2", "--once")
    ranks = cluster.ranks(address, 2, *FLAGS[topology], APART, kind)
    watch = Stopwatch()
    for rank in ranks:
        assert rank.wait() == ConfigError.exit_code
        said = rank.said().splitlines()[-1]
        assert re.search(rf"rank 0 for \d+ s {first}; rank 1 for \d+ s {second}", said), said
    assert watch.seconds < SOON


@pytest.mark.parametrize("topology", ["hub", pytest.param("ring", marks=pytest.mark.full)])
def test_a_backward_on_one_rank_only_ends_the_job(cluster: Cluster, topology: str) -> None:
    server, address = cluster.server("--workers", "2", "--once")
    ranks = cluster.ranks(address, 2, *FLAGS[topology], APART, "backward")
    assert [one.wait() for one in (*ranks, server)] == [ConfigError.exit_code] * 3

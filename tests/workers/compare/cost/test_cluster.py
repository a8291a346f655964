"""Allreduces between GPUs: their formulas, and the published sweeps that they reproduce."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.cost.calibrations import BUNDLED, CLUSTERS, find, with_nodes
from hubring.workers.compare.cost.cluster.allreduce import Algorithm, Shape, allreduce
from hubring.workers.compare.cost.cluster.cluster import Cluster, Level, Table, depth
from hubring.workers.compare.cost.cluster.curve import Curve, fitted, measured
from hubring.workers.compare.result.nccl_tests import busbw

GIGA = 1 << 30
PLAIN = Cluster(name="plain", gpus=8, inside=Level(rate=400e9), between=Level(rate=100e9))
"""No latency: bytes alone."""
ALGORITHMS: tuple[Algorithm, ...] = ("ring", "tree", "two-level")


def bundled(name: str) -> Cluster:
    cluster = find(name).constants.cluster
    assert cluster is not None
    return cluster


def bus(cluster: Cluster, algorithm: Algorithm, nodes: int, nbytes: int = 8 * GIGA, gpus: int = 8) -> float:
    """Returns GB/s."""
    shape = Shape(nodes, gpus)
    return busbw(nbytes, allreduce(cluster, algorithm, shape, nbytes).seconds, shape.ranks)


def without(cluster: Cluster, nodes: int) -> Cluster:
    return replace(cluster, tables=[table for table in cluster.tables if table.nodes != nodes])


def formula(cluster: Cluster, nodes: int, nbytes: int) -> float:
    """Returns the GB/s of the faster of ring and tree, without the sweep of as many nodes."""
    return max(bus(cluster, name, nodes, nbytes) for name in ("ring", "tree"))


def published(cluster: Cluster, nodes: int) -> list[tuple[int, float]]:
    """Returns sizes from 64 MiB with their GB/s."""
    (table,) = [each for each in cluster.tables if (each.nodes, each.algorithm) == (nodes, "nccl")]
    return [(size, busbw(size, seconds, table.ranks)) for size, seconds in table.seconds if size >= 64 << 20]


@pytest.mark.parametrize(("name", "nodes"), [("h100", 1), ("h100", 2), ("h100", 4), ("dgx-a100", 1)])
def test_formulas_reproduce_the_published_bandwidth_that_they_were_fitted_to(name: str, nodes: int) -> None:
    cluster = bundled(name)
    for size, known in published(cluster, nodes):
        assert formula(cluster, nodes, size) == pytest.approx(known, rel=0.2), size


def test_eight_nodes_of_h100_are_predicted_from_fewer() -> None:
    cluster = bundled("h100")
    fewer = without(cluster, 8)
    for size, known in published(cluster, 8):
        assert bus(fewer, "nccl", 8, size) == pytest.approx(known, rel=0.2), size
        assert not fewer.covers(8, 8, size)


@pytest.mark.parametrize("name", CLUSTERS)
def test_what_was_measured_is_answered_as_it_was_measured(name: str) -> None:
    cluster = bundled(name)
    for table in cluster.tables:
        for size, micro in table.rows if table.algorithm == "nccl" else []:
            found = allreduce(cluster, "nccl", Shape(table.nodes, 8), size).seconds
            assert found == pytest.approx(micro / 1e6)
            assert cluster.covers(table.nodes, 8, size)


def test_dgx_a100_nodes_reach_what_was_published_between_them() -> None:
    # https://github.com/NVIDIA/nccl/issues/812: 192 GB/s with eight links of 200 Gbit/s
    assert bus(bundled("dgx-a100"), "ring", 4) == pytest.approx(192, rel=0.2)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_published_figure_names_its_source(name: str) -> None:
    cluster = bundled(name)
    named = [(table.source, table.about) for table in cluster.tables]
    named += [(each.source, each.about) for each in (cluster.inside, cluster.between) if each is not None]
    assert all(source.startswith("https://") and about for source, about in named)


def test_bundled_calibrations_are_all_read() -> None:
    assert [find(name).name for name in BUNDLED] == list(BUNDLED)


@pytest.mark.parametrize("nodes", [2, 4, 8, 64])
def test_levels_carry_the_bytes_of_their_algorithm(nodes: int) -> None:
    n, m = 8 * nodes, nodes
    expected = {
        "ring": 2 * (n - 1) / n / 100e9,
        "tree": (1 if m == 2 else 2) / 100e9,
        "two-level": 2 * (m - 1) / m / 100e9,
    }
    for algorithm in ALGORITHMS:
        found = allreduce(PLAIN, algorithm, Shape(nodes, 8), GIGA)
        assert found.between == pytest.approx(expected[algorithm] * GIGA)
    assert allreduce(PLAIN, "two-level", Shape(nodes, 8), GIGA).inside == pytest.approx(7 / 4 * GIGA / 400e9)


def test_trees_have_fewer_hops_than_a_ring_between_many_nodes() -> None:
    slow = replace(PLAIN, between=Level(rate=100e9, alpha=1e-5))
    ring, tree, two = (allreduce(slow, name, Shape(64, 8), 4).latency for name in ALGORITHMS)
    assert tree == pytest.approx(2 * 6 * 1e-5)
    assert ring == two == pytest.approx(2 * 63 * 1e-5)
    assert allreduce(slow, "nccl", Shape(64, 8), 4).seconds == pytest.approx(tree)
    assert [depth(nodes) for nodes in (1, 2, 3, 4, 5, 8)] == [0, 1, 2, 2, 3, 3]


def test_two_nodes_show_more_than_their_links_carry() -> None:
    assert bus(PLAIN, "tree", 2) > 100
    assert bus(PLAIN, "ring", 2) == pytest.approx(100)


@pytest.mark.parametrize(("workers", "shape"), [(1, (1, 1)), (4, (1, 4)), (8, (1, 8)), (64, (8, 8))])
def test_workers_fill_nodes(workers: int, shape: tuple[int, int]) -> None:
    assert Shape.of(workers, 8) == shape
    assert Shape.of(workers, 8).ranks == workers


def test_a_missing_level_is_named_with_the_option_that_replaces_it() -> None:
    one, many = (
        Cluster(name="mine", gpus=8, tables=[Table(nodes=nodes, gpus=8, rows=[(GIGA, 1e4)])])
        for nodes in (1, 4)
    )
    with pytest.raises(UsageError, match="mine has no sweep of several nodes; add `--rate`"):
        allreduce(one, "ring", Shape(2, 8), GIGA)
    with pytest.raises(UsageError, match="mine has no sweep of one node with several GPUs; add `--intra`"):
        allreduce(many, "ring", Shape(4, 8), GIGA)
    host = find("host").constants
    described = with_nodes(replace(host, cluster=one), None, None, 400e9, 2e-6).cluster
    assert described is not None
    assert bus(described, "ring", 2) == pytest.approx(50 * 1448 / 1514, rel=0.05)
    assert not described.covers(2, 8, GIGA)


@given(
    alpha=st.floats(1e-6, 1e-4), fill=st.floats(0, 1e-7), rate=st.floats(1e9, 1e12), count=st.integers(16, 24)
)
@settings(max_examples=30, deadline=None)
def test_a_fit_finds_the_curve_again(  # even where a sweep ends before its rate shows
    alpha: float, fill: float, rate: float, count: int
) -> None:
    curve = Curve(alpha=alpha, fill=fill, rate=rate)
    rows = [(size, curve.seconds(size)) for size in (1024 << power for power in range(count))]
    found = fitted(rows)
    for size, seconds in rows:
        assert found.seconds(size) == pytest.approx(seconds, rel=0.4)
        assert measured(rows, size) == pytest.approx(seconds)
    assert measured(rows, 1) is None
    assert fitted(rows[-1:]).seconds(rows[-1][0]) == pytest.approx(rows[-1][1])


def test_a_cluster_is_the_same_after_a_file() -> None:
    cluster = bundled("h100")
    assert msgspec.json.decode(msgspec.json.encode(cluster), type=Cluster) == cluster


@pytest.mark.parametrize("nbytes", [64 << 20, GIGA, 8 * 10**9])
def test_a_cluster_between_two_sweeps_is_not_slower_than_both(nbytes: int) -> None:
    cluster = bundled("h100")
    two, three, four, five, many = (
        allreduce(cluster, "nccl", Shape(nodes, 8), nbytes).seconds for nodes in (2, 3, 4, 5, 16)
    )
    assert min(two, four) * 0.99 <= three <= max(two, four) * 1.01
    assert five == pytest.approx(four, rel=0.05)
    assert many == pytest.approx(five, rel=0.06)


def test_one_node_does_not_tell_how_several_differ_from_the_formula() -> None:
    cluster = bundled("dgx-a100")
    for nodes in (2, 4):
        best = min(allreduce(cluster, name, Shape(nodes, 8), GIGA).seconds for name in ("ring", "tree"))
        assert allreduce(cluster, "nccl", Shape(nodes, 8), GIGA).seconds == best


def test_only_what_was_measured_with_as_many_gpus_is_covered() -> None:
    cluster = bundled("h100")
    assert cluster.covers(3, 8, GIGA)
    assert not cluster.covers(1, 4, GIGA)
    assert not cluster.covers(16, 8, GIGA)
    assert not cluster.covers(8, 8, 8192)
    assert all(source.startswith("https://") for source in cluster.sources)

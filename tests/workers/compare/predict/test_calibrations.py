"""Calibrations: constants in memory and in a file, and the published sweeps that formulas reproduce."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.predict.calibrations import (
    CLUSTERS,
    find_calibration,
    read_constants,
    with_nodes,
)
from hubring.workers.compare.predict.nccl import (
    Algorithm,
    AllreduceCurve,
    Cluster,
    ClusterShape,
    SweepTable,
    allreduce,
    fitted,
    measured,
)
from hubring.workers.peers.nccl_tests import busbw, read_nccl_output
from tests.support.compare.calibration import SIZES, output

GIGA = 1 << 30


def bundled(name: str) -> Cluster:
    cluster = find_calibration(name)[1].cluster
    assert cluster is not None
    return cluster


def bus(cluster: Cluster, algorithm: Algorithm, nodes: int, nbytes: int = 8 * GIGA, gpus: int = 8) -> float:
    """Returns GB/s."""
    shape = ClusterShape(nodes, gpus)
    return busbw(nbytes, allreduce(cluster, algorithm, shape, nbytes).seconds, shape.ranks)


def without(cluster: Cluster, nodes: int) -> Cluster:
    return replace(cluster, tables=[table for table in cluster.tables if table.nodes != nodes])


def formula(cluster: Cluster, nodes: int, nbytes: int) -> float:
    """Returns the GB/s of the faster of ring and tree, without the sweep of as many nodes."""
    return max(bus(cluster, name, nodes, nbytes) for name in ("ring", "tree"))


def published(cluster: Cluster, nodes: int) -> list[tuple[int, float]]:
    """Returns sizes from 64 MiB with their GB/s."""
    (table,) = [each for each in cluster.tables if (each.nodes, each.algorithm) == (nodes, "nccl")]
    return [
        (size, busbw(size, seconds, table.shape.ranks)) for size, seconds in table.seconds if size >= 64 << 20
    ]


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
        assert not fewer.covers(ClusterShape(8, 8), size)


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_measured_point_is_predicted_as_it_was_measured(name: str) -> None:
    cluster = bundled(name)
    for table in cluster.tables:
        for size, micro in [*table.rows[::4], table.rows[-1]] if table.algorithm == "nccl" else []:
            found = allreduce(cluster, "nccl", table.shape, size).seconds
            assert found == pytest.approx(micro / 1e6)
            assert cluster.covers(table.shape, size)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_published_figure_names_its_source(name: str) -> None:
    cluster = bundled(name)
    named = [(table.source, table.about) for table in cluster.tables]
    named += [(each.source, each.about) for each in (cluster.inside, cluster.between) if each is not None]
    assert all(source.startswith("https://") and about for source, about in named)


def test_a_missing_level_is_named_with_the_option_that_replaces_it() -> None:
    one, many = (
        Cluster(name="mine", gpus=8, tables=[SweepTable(nodes=nodes, gpus=8, rows=[(GIGA, 1e4)])])
        for nodes in (1, 4)
    )
    with pytest.raises(UsageError, match="mine has no sweep of several nodes; add `--rate`"):
        allreduce(one, "ring", ClusterShape(2, 8), GIGA)
    with pytest.raises(UsageError, match="mine has no sweep of one node with several GPUs; add `--intra`"):
        allreduce(many, "ring", ClusterShape(4, 8), GIGA)
    host = find_calibration("host")[1]
    described = with_nodes(replace(host, cluster=one), None, None, 400e9, 2e-6).cluster
    assert described is not None
    assert bus(described, "ring", 2) == pytest.approx(50 * 1448 / 1514, rel=0.05)
    assert not described.covers(ClusterShape(2, 8), GIGA)


@given(
    alpha=st.floats(1e-6, 1e-4), fill=st.floats(0, 1e-7), rate=st.floats(1e9, 1e12), count=st.integers(16, 24)
)
@settings(max_examples=30, deadline=None)
def test_a_fit_finds_the_curve_again(  # even where a sweep ends before its rate shows
    alpha: float, fill: float, rate: float, count: int
) -> None:
    curve = AllreduceCurve(alpha=alpha, fill=fill, rate=rate)
    rows = [(size, curve.seconds(size)) for size in (1024 << power for power in range(count))]
    found = fitted(rows)
    for size, seconds in rows:
        assert found.seconds(size) == pytest.approx(seconds, rel=0.4)
        assert measured(rows, size) == pytest.approx(seconds)
    assert measured(rows, 1) is None
    assert fitted(rows[-1:]).seconds(rows[-1][0]) == pytest.approx(rows[-1][1])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"wires": {}}'])
def test_a_file_that_is_no_calibration_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"calibration\.json is not a calibration .*ps-compare calibrate"):
        read_constants(file)


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 2), (1, 8), (4, 8), (8, 8)])
def test_without_a_list_of_devices_bandwidths_tell_the_ranks(nodes: int, gpus: int) -> None:
    (found,) = read_nccl_output(output(nodes, gpus, 400e9, listed=False))
    assert found.nodes is None
    assert found.ranks == pytest.approx(nodes * gpus, abs=2)


def test_prefixes_of_launchers_and_repeated_sizes_are_understood() -> None:
    lines = output(1, 8, 100e9).splitlines()
    twice = "\n".join(f"[0] {line}" for line in lines for _ in range(2 if line[:1] == " " else 1))
    (found,) = read_nccl_output(twice)
    assert len(found.rows) == len(SIZES)


def test_old_versions_have_no_root() -> None:
    row = "  1073741824  268435456  float  sum  8166.8  131.48  230.08  2e-07  8165.2  131.50  230.13  2e-07"
    (found,) = read_nccl_output(row)
    assert found.ranks == 8
    assert found.rows[0] == pytest.approx((1 << 30, 8166.8e-6))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no row of sizes and times; expected the output of nccl-tests"),
        ("# Collective test starting: all_gather_perf\n", "the output of all_gather_perf; expected"),
        ("  1048576 262144 float none -1 50.13 20.92 36.61 0 42.74 24.53 42.93 0", "without a reduction"),
    ],
)
def test_another_text_is_refused_with_what_was_expected(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_nccl_output(text)

"""The output of nccl-tests is read whatever its launcher, its version and its number of runs."""

from __future__ import annotations

import pytest

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.result.nccl_output import read_output
from tests.support.compare.nccl import SIZES, output


def test_ranks_hosts_and_times_are_read() -> None:
    (found,) = read_output(output(2, 8, 100e9))
    assert (found.ranks, found.nodes) == (16, 2)
    assert [size for size, _ in found.rows] == list(SIZES)
    assert found.rows[-1][1] == pytest.approx(15 / 8 * SIZES[-1] / 100e9, rel=1e-4)


def test_a_text_may_hold_several_runs() -> None:
    found = read_output(output(1, 8, 400e9) + output(4, 8, 100e9))
    assert [(each.nodes, each.ranks) for each in found] == [(1, 8), (4, 32)]


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 2), (1, 8), (4, 8), (8, 8)])
def test_without_a_list_of_devices_bandwidths_tell_the_ranks(nodes: int, gpus: int) -> None:
    (found,) = read_output(output(nodes, gpus, 400e9, listed=False))
    assert found.nodes is None
    assert found.ranks == pytest.approx(nodes * gpus, abs=2)


def test_prefixes_of_launchers_and_repeated_sizes_are_understood() -> None:
    lines = output(1, 8, 100e9).splitlines()
    twice = "\n".join(f"[0] {line}" for line in lines for _ in range(2 if line[:1] == " " else 1))
    (found,) = read_output(twice)
    assert len(found.rows) == len(SIZES)


def test_old_versions_have_no_root() -> None:
    row = "  1073741824  268435456  float  sum  8166.8  131.48  230.08  2e-07  8165.2  131.50  230.13  2e-07"
    (found,) = read_output(row)
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
        read_output(text)

"""The bench checks what it times, and counts what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from workers.bench.__main__ import main
from workers.bench.member import PERIOD, Member, model_of
from workers.bench.table import HEAD, entry
from workers.bench.team import ROWS, Turn
from workers.bucketing import Bucket, make_buckets
from workers.local_communicator import LocalCommunicator

BUCKET_BYTES = 4 * PERIOD


class Mean:
    """Stands for two ranks, of which this is the first; may forget the other, or a step."""

    rank, size = 0, 2

    def __init__(self, other: float = 2.0, forget: int | None = None) -> None:
        model: nn.Module = nn.ParameterList(torch.zeros(PERIOD) for _ in range(2))
        self._sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        named = model.named_parameters()
        self.buckets: list[Bucket] = make_buckets(
            self._sgd, named, LocalCommunicator().allocate, BUCKET_BYTES, "SGD"
        )
        self.barriers = 0
        self._other = other
        self._forget = forget

    def barrier(self) -> None:
        self.barriers += 1

    def step(self) -> None:
        for bucket in self.buckets:
            bucket.gradients.mul_((1 + self._other) / 2)
        if self.barriers != self._forget:
            self._sgd.step()


def test_a_right_mean_and_step_leave_nothing_wrong() -> None:
    side = Mean()
    member = Member(side)
    assert [member.obey(3)["wrong"], member.obey(2)["wrong"]] == [0, 0]
    assert side.barriers == 5


@pytest.mark.parametrize("side", [Mean(other=0.0), Mean(other=2.001), Mean(forget=1), Mean(forget=3)])
def test_a_lost_rank_a_slightly_wrong_mean_and_a_lost_step_make_every_element_wrong(side: Mean) -> None:
    assert Member(side).obey(3)["wrong"] == 2 * PERIOD


def test_one_wrong_element_is_counted_as_one() -> None:
    side = Mean()
    member = Member(side)
    side.buckets[1].values[7] += 1e-3
    assert member.obey(1)["wrong"] == 1


def test_a_step_is_as_slow_as_its_slowest_and_bandwidths_are_nccl_tests() -> None:
    found = entry("hub-shm", 4, "flat", 8_000_000, [Turn([0.004, 0.001], 0), Turn([0.002], 3)])
    assert (found.median_ms, found.min_ms, found.steps) == (pytest.approx(2), pytest.approx(1), 3)
    assert (found.algbw, found.busbw) == (pytest.approx(4.0), pytest.approx(6.0))
    assert found.wrong == 3


def test_a_line_of_the_table_is_as_wide_as_its_head() -> None:
    line = str(entry("gloo+sgd", 2, "bucketed", 104857600, [Turn([0.1], 0)]))
    assert {len(line)} == {len(part) for part in HEAD.splitlines()}


def test_a_model_that_does_not_fill_its_buckets_is_refused() -> None:
    with pytest.raises(SystemExit, match="3 MiB do not divide into buckets of 2097152 bytes"):
        model_of(3, 2 * 2**20)


@pytest.mark.slow
def test_all_rows_come_out_right_on_real_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    with pytest.raises(SystemExit) as ended:
        main(["--workers", "2", "--megabytes", "1", "--shapes", "flat", "--rounds", "1", "--out", str(out)])
    assert ended.value.code == 0, capsys.readouterr().err
    found = json.loads(out.read_text())
    assert [(each["row"], each["wrong"], each["steps"]) for each in found] == [(row, 0, 3) for row in ROWS]

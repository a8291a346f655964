"""Predictions of rows."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hubring.workers.compare.plan.row import ROWS
from hubring.workers.compare.plan.setting import Link
from hubring.workers.compare.predict.prediction import predict, read_row, traffic
from hubring.workers.runtime.slowdown import Straggler, StragglerKind
from tests.support.compare.calibration import CONSTANTS, JOB, LINKED


@pytest.mark.parametrize("row", [*ROWS, "hub-zmq", "hub-grpc", "ddp", "fsdp2", "zero1", "mpi", "rpc"])
def test_every_row_has_a_model(row: str) -> None:
    predicted = predict(CONSTANTS, row, LINKED, JOB)
    assert predicted.step_seconds >= JOB.compute
    assert predicted.by == "formula"


def test_sharded_rows_move_more_bytes_than_an_allreduce_and_step_less() -> None:
    job = replace(JOB, overlap=2 / 3, compute=0.1)
    ddp, fsdp2, zero1 = (predict(CONSTANTS, row, LINKED, job) for row in ("ddp", "fsdp2", "zero1"))
    assert fsdp2.parts["link"] == pytest.approx(2 * ddp.parts["link"])
    assert zero1.parts["link"] == pytest.approx(1.5 * ddp.parts["link"])
    assert zero1.parts["step"] < ddp.parts["step"]
    # Backward hides nothing of fsdp2's exchange, and of zero1's only the allreduce.
    assert fsdp2.step_seconds == pytest.approx(job.compute + fsdp2.exchange)
    assert job.compute + zero1.exchange > zero1.step_seconds > ddp.step_seconds


def test_stragglers_cost_lockstep_more_than_others() -> None:
    slow = replace(LINKED, servers=4, straggler=Straggler(kind="pareto", seconds=0.2))

    bsp, ssp, asp = (predict(CONSTANTS, row, slow, JOB) for row in ("hub-bsp", "hub-ssp", "hub-asp"))
    assert bsp.step_seconds > ssp.step_seconds > asp.step_seconds
    assert bsp.by == "simulation"


def test_an_exchange_hides_behind_backward_but_for_its_last_group() -> None:
    shown = predict(CONSTANTS, "hub-bsp", LINKED, replace(JOB, slice_bytes=1 << 20))
    hidden = predict(CONSTANTS, "hub-bsp", LINKED, replace(JOB, slice_bytes=1 << 20, overlap=0.5))
    # Groups of 24 and 16 MiB: the first one leaves when 16/40 of backward, 50 ms, are left.
    assert shown.step_seconds - hidden.step_seconds == pytest.approx(0.02)


def test_the_host_s_own_ceiling_is_no_link() -> None:
    at = {rate: replace(LINKED, link=Link(rate=rate)) for rate in (1e9, 25e9, 400e9)}
    job = replace(JOB, compute=0.0)
    slow, fast, faster = (predict(CONSTANTS, "ring", setting, job) for setting in at.values())
    assert (slow.bound, slow.extrapolated) == ("link", False)
    assert (fast.bound, fast.extrapolated) == ("I/O thread", True)
    assert fast.parts["link"] > faster.parts["link"] > 0
    assert fast.step_seconds == pytest.approx(faster.step_seconds)
    measured = replace(CONSTANTS, link=Link(rate=25e9))
    assert not predict(measured, "ring", at[25e9], JOB).extrapolated


def test_a_ring_of_workers_that_share_one_host_passes_no_link() -> None:
    four, five = (replace(LINKED, workers=workers, link=Link(rate=1e8, sharing=4)) for workers in (4, 5))
    for row in ("ring", "ring-local"):
        here, apart = (predict(CONSTANTS, row, setting, JOB).parts["link"] for setting in (four, five))
        assert here == 0.0 < apart


def test_two_levels_pass_a_host_s_link_as_one_worker_does() -> None:
    near, apart = (Link(rate=1e8, sharing=sharing) for sharing in (2, 1))
    job = replace(JOB, compute=0.0)
    for plain, local in (("hub-bsp", "hub-local"), ("ring", "ring-local")):
        found = predict(CONSTANTS, local, replace(LINKED, link=near), job)
        two = predict(CONSTANTS, plain, replace(LINKED, workers=2, link=apart), job)
        assert found.step_seconds == pytest.approx(two.step_seconds, rel=0.1), "and a passage of memory"
    four = predict(CONSTANTS, "hub-bsp", replace(LINKED, servers=4, link=near), job)
    assert (
        four.step_seconds
        > 1.5 * predict(CONSTANTS, "hub-local", replace(LINKED, servers=4, link=near), job).step_seconds
    )


@pytest.mark.parametrize("row", ["ring", "hub-bsp", "hub-ssp", "hub-asp", "hub-backup"])
@pytest.mark.parametrize("kind", ["constant", "pareto", "host"])
def test_step_and_speed_agree(row: str, kind: StragglerKind) -> None:
    slow = replace(LINKED, straggler=Straggler(kind=kind, seconds=0.1, ranks=(1, 2)))
    for setting in (LINKED, slow):
        found = predict(CONSTANTS, row, setting, JOB)
        assert found.samples_per_second is not None
        assert found.step_seconds * found.samples_per_second == pytest.approx(4 * 32, rel=0.01)


def test_random_delays_have_the_range_of_their_seeds() -> None:
    slow = replace(LINKED, straggler=Straggler(kind="pareto", seconds=0.1))
    found = predict(CONSTANTS, "hub-bsp", slow, JOB)
    assert found.low < found.step_seconds < found.high
    alone = [predict(CONSTANTS, "hub-bsp", slow, JOB, seeds=(seed,)).step_seconds for seed in range(5)]
    assert (min(alone), max(alone)) == pytest.approx((found.low, found.high))
    calm = predict(CONSTANTS, "hub-bsp", LINKED, JOB)
    assert calm.low == calm.step_seconds == calm.high == calm.median_seconds


@pytest.mark.parametrize(
    ("row", "share"),
    [("ring-int8", 1 / 4), ("hub-int8", 5 / 8), ("ring-topk:0.01", 0.02), ("hub-bf16", 3 / 4), ("ring", 1.0)],
)
def test_a_codec_leaves_its_share_of_the_bytes(row: str, share: float) -> None:
    assert traffic(read_row(row)) == pytest.approx(share)

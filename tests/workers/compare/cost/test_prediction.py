"""Predictions of rows."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.cost.prediction import predict
from hubring.workers.compare.cost.row_case import read as reading_of
from hubring.workers.compare.experiment.row import ROWS, Row
from hubring.workers.compare.experiment.setting import Fault, Link, Setting
from hubring.workers.slowdown.straggler import Kind, Straggler
from tests.support.compare.calibration import CONSTANTS, JOB, LINKED

MEBI = 1 << 20


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


def test_zero1_steps_and_broadcasts_whole_parameters() -> None:
    def steps(*tensors: int) -> float:
        job = replace(JOB, tensors=tensors, model_bytes=sum(tensors))
        return predict(CONSTANTS, "zero1", replace(LINKED, workers=2), job).parts["link"]

    even, uneven = steps(4 * MEBI, 2 * MEBI, 2 * MEBI), steps(7 * MEBI, MEBI)
    assert uneven / even == pytest.approx((1 + 7 / 8) / (1 + 1 / 2))


def test_a_row_without_a_model_is_refused_with_those_that_have_one() -> None:
    with pytest.raises(UsageError, match="no model of row 'gossip'; expected one of local, ring"):
        predict(CONSTANTS, "gossip", LINKED, JOB)


def test_a_row_is_read_from_what_its_programs_are_told() -> None:
    ssp = reading_of("hub-ssp")
    assert (ssp.rule, ssp.staleness, ssp.steps) == ("ssp", 2, True)
    assert not reading_of("hub-aggregate").steps
    near = Row("near", "", ("--mode", "bsp", "--colocate"))
    assert predict(CONSTANTS, near, LINKED, JOB).bound == "link"
    spare = Row("mine", "", ("--mode", "backup", "--backup", "3"), ("--transport", "grpc"))
    assert (reading_of(spare).rule, reading_of(spare).backup, reading_of(spare).wire) == ("backup", 3, "grpc")


@pytest.mark.parametrize(
    "more", [{"straggler": Straggler(kind="pareto", seconds=0.02)}, {"fault": Fault(rank=1, step=10)}]
)
def test_what_is_not_alike_is_simulated(more: dict[str, Any]) -> None:
    setting = replace(LINKED, **more)
    assert predict(CONSTANTS, "hub-asp", setting, JOB).by == "simulation"


def test_stragglers_cost_lockstep_more_than_others() -> None:
    slow = replace(LINKED, servers=4, straggler=Straggler(kind="pareto", seconds=0.2))

    def speed(row: str) -> float:
        found = predict(CONSTANTS, row, slow, JOB).samples_per_second
        assert found is not None
        return found

    assert speed("hub-bsp") < speed("hub-ssp") < speed("hub-asp")


def test_a_process_alone_computes_for_all() -> None:
    calm, computing = (
        predict(CONSTANTS, "local", Setting(workers=4, compute=compute), JOB).step_seconds
        for compute in (None, 0.01)
    )
    assert computing - calm == pytest.approx(0.04)


def test_a_ring_does_not_outlive_a_loss_and_a_lone_process_knows_of_none() -> None:
    lossy = replace(LINKED, fault=Fault(rank=1, step=10))
    assert not predict(CONSTANTS, "ring", lossy, JOB).finished
    assert predict(CONSTANTS, "hub-bsp", lossy, JOB).finished
    assert predict(CONSTANTS, "local", lossy, JOB) == predict(CONSTANTS, "local", LINKED, JOB)
    with pytest.raises(UsageError, match="with one worker leaves no worker"):
        predict(CONSTANTS, "hub-bsp", Setting(workers=1, fault=Fault(rank=0, step=1)), JOB)


def test_an_exchange_hides_behind_backward_but_for_its_last_group() -> None:
    shown = predict(CONSTANTS, "hub-bsp", LINKED, replace(JOB, slice_bytes=1 << 20))
    hidden = predict(CONSTANTS, "hub-bsp", LINKED, replace(JOB, slice_bytes=1 << 20, overlap=0.5))
    # Groups of 24 and 16 MiB: the first one leaves when 16/40 of backward, 50 ms, are left.
    assert shown.step_seconds - hidden.step_seconds == pytest.approx(0.02)


def test_emulated_backward_hides_what_is_ready_as_well() -> None:
    asleep = predict(CONSTANTS, "hub-bsp", replace(LINKED, compute=0.3), replace(JOB, compute=0.0))
    awake = predict(CONSTANTS, "hub-bsp", LINKED, replace(JOB, compute=0.3))
    # Groups of 4 MiB gain more than a twentieth here: nine tenths of backward, 0.2 s, remain after the first.
    assert awake.step_seconds - asleep.step_seconds == pytest.approx(0.2 * 36 / 40)


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


@pytest.mark.parametrize("row", ["ring", "hub-bsp", "hub-ssp", "hub-asp", "hub-backup"])
@pytest.mark.parametrize("kind", ["constant", "pareto", "host"])
def test_step_and_speed_agree(row: str, kind: Kind) -> None:
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


def test_a_heavier_tail_parts_the_mean_of_lockstep_from_its_median() -> None:
    ratios = []
    for shape in (1.5, 4.0):
        slow = replace(LINKED, straggler=Straggler(kind="pareto", seconds=0.5, shape=shape))
        found = predict(CONSTANTS, "hub-bsp", slow, replace(JOB, model_bytes=4096), steps=400)
        ratios.append(found.step_seconds / found.median_seconds)
    assert ratios[0] > ratios[1] > 1


def test_the_links_part_is_of_the_exchange_whatever_overlaps_it() -> None:
    predicted = predict(CONSTANTS, "hub-bsp", LINKED, JOB)
    parts = predicted.parts | {"link": 0.3, "server": 0.3, "cores": 0.3}
    assert replace(predicted, parts=parts, exchange=0.4).links == pytest.approx(0.75)
    assert replace(predicted, parts=parts, exchange=0.2).links == 1
    assert predict(CONSTANTS, "local", LINKED, JOB).links == 0
    assert predicted.exchange == pytest.approx(predicted.step_seconds - JOB.compute)


def test_efficiency_is_the_part_that_computes() -> None:
    predicted = predict(CONSTANTS, "ring", LINKED, JOB)
    assert predicted.efficiency == pytest.approx(0.1 / predicted.step_seconds)
    assert predicted.samples_per_second == pytest.approx(4 * 32 / predicted.step_seconds)
    assert predicted.bound == "link"


@pytest.mark.parametrize(
    ("row", "share"),
    [("ring-int8", 1 / 4), ("hub-int8", 5 / 8), ("ring-topk:0.01", 0.02), ("hub-bf16", 3 / 4), ("ring", 1.0)],
)
def test_a_codec_leaves_its_share_of_the_bytes(row: str, share: float) -> None:
    assert reading_of(row).traffic == pytest.approx(share)


def test_the_size_of_powersgd_is_not_guessed() -> None:
    with pytest.raises(UsageError, match="no model of --compress powersgd:4, whose size depends"):
        reading_of("ring-powersgd:4")


def test_a_hub_that_would_wait_for_no_worker_is_refused() -> None:
    with pytest.raises(UsageError, match="waits for all but 1 of the workers, and there are only 1"):
        predict(CONSTANTS, "hub-backup", Setting(workers=1), JOB)
    assert predict(CONSTANTS, "hub-backup", Setting(workers=2), JOB).step_seconds > 0


def test_workers_that_queue_for_a_link_are_bound_by_it() -> None:
    job = replace(JOB, model_bytes=100 * MEBI)
    setting = replace(LINKED, workers=64)
    predicted = predict(CONSTANTS, "hub-asp", setting, job)
    assert predicted.parts["waiting"] > 0.9 * predicted.step_seconds
    assert predicted.bound in ("link", "I/O thread", "server")
    slow = replace(setting, workers=2, straggler=Straggler(kind="constant", seconds=5.0, ranks=(0,)))
    assert predict(CONSTANTS, "hub-bsp", slow, JOB).bound == "waiting"

"""Numbers come from the records by the definitions, and the table from the numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hubring.ps.core.errors import HubringError, UsageError
from hubring.workers.compare.cli import _result
from hubring.workers.compare.decide.results import JudgedRuns
from hubring.workers.compare.findings import RowResult
from hubring.workers.compare.gate.same_parameters import Judgement
from hubring.workers.compare.measure import Numbers, check, measure
from hubring.workers.compare.plan.experiment import JOBS, Experiment, JobMetric
from hubring.workers.compare.plan.row import ROWS
from hubring.workers.compare.plan.run_order import PlannedRun, counted
from hubring.workers.compare.plan.setting import Setting
from hubring.workers.compare.run.noise import RunNoise
from hubring.workers.compare.run.outcome import Line, RunOutcome
from hubring.workers.compare.statistics import NUMBERS, Number
from tests.support.compare.replayed import Replayed, compared, record, row
from tests.support.compare.results import minimal, read

DIGITS = JOBS["digits"]
EXCHANGE = {
    "bytes_sent": 0,
    "bytes_received": 0,
    "exposed_seconds": 7.0,
    "hidden_seconds": 1.0,
    "staleness_mean": 0.0,
    "staleness_max": 0,
}
"""As a worker's last line has it that tells everything."""
USAGE = {"cpu_seconds": 5.0, "peak_bytes": 300_000_000}


def outcome_of(**more: Any) -> RunOutcome:
    usual: dict[str, Any] = {"noise": [RunNoise((0, 0), None)], "results": [], "server": None}
    return RunOutcome(folder=Path(), commands=(), began="", seconds=1.0, **usual | more)


def measured(
    *records: Sequence[Line],
    job: JobMetric = DIGITS,
    warmup: int | None = None,
    name: str = "hub-bsp",
    **more: Any,
) -> Numbers:
    """Measures a run whose records are in memory."""
    records = records or (record(0.1), record(0.1))
    exchange = {"bytes_sent": 4000, "bytes_received": 6000, "exposed_seconds": 0.5}
    usual: dict[str, Any] = {
        "run": PlannedRun(Setting(workers=2), ROWS[name], seed=0),
        "results": [
            {"exchange": exchange | {"staleness_mean": rank + 1.0, "staleness_max": 5 * rank}, "usage": USAGE}
            for rank in range(len(records))
        ],
    }
    outcome = outcome_of(**usual | more)
    vars(outcome)["records"] = records
    check(outcome, job)
    return measure(outcome, job, warmup)


def aimed(target: float, name: str = "digits") -> JobMetric:
    return replace(JOBS[name], target=target)


def test_speed_leaves_out_warm_up_and_measuring_the_model() -> None:
    late = [
        {**line, "seconds": line["seconds"] + (7.0 if line["step"] >= 8 else 0.0)} for line in record(0.1)
    ]
    found = measured(late, late)
    assert found["samples_per_second"] == pytest.approx(2 * 32 / 0.1)
    assert found["step_ms"] == pytest.approx(100)
    cold = measured(late, late, warmup=0)["samples_per_second"]
    assert cold is not None
    assert cold < 2 * 32 / 0.15


def test_others_are_not_charged_for_waiting_while_rank_0_measures() -> None:
    waiting = [line for line in record(0.1) if "samples" in line]
    assert measured(record(0.1), waiting)["samples_per_second"] == pytest.approx(2 * 32 / 0.1)


def test_speed_counts_the_steps_on_which_a_rank_stood_still() -> None:
    stalled = [
        {**line, "seconds": line["seconds"] + (9.0 if line["step"] > 55 else 0.0)} for line in record(0.1)
    ]
    found, steps = measured(stalled), 80 - 6  # in six steps other elements are recorded
    assert found["step_ms"] == pytest.approx(100)
    assert found["step_mean_ms"] == pytest.approx(100 + 9000 / steps)
    assert found["samples_per_second"] == pytest.approx(steps * 32 / (steps * 0.1 + 9.0))


def test_seconds_and_samples_count_from_the_end_of_the_first_step() -> None:
    found = measured(job=aimed(0.9))
    # 89 more steps and the measurements after steps 10, 20 ... 90
    assert found["seconds_to_target"] == pytest.approx(89 * 0.1 + 9 * 3.0)
    assert found["samples_to_target"] == 2 * 90 * 32
    assert found["seconds"] == pytest.approx(99 * 0.1 + 10 * 3.0)


def test_without_lockstep_samples_are_those_that_all_took_by_then() -> None:
    found = measured(record(0.1, pause=0.0), record(0.3, pause=0.0), job=aimed(0.9), name="hub-asp")
    # 8.9 s after the first step, which each has taken by then.
    assert found["samples_to_target"] == (90 + 30) * 32


def test_a_killed_worker_is_left_out_of_the_speed() -> None:
    result = {"exchange": EXCHANGE, "usage": USAGE}
    found = measured(record(0.1), record(0.1)[:20], results=[result, None])
    assert found["samples_per_second"] == pytest.approx(32 / 0.1)


def ended_with(**last: float) -> list[Line]:
    """A record whose last report says so."""
    lines = record(0.01)
    return [*lines[:-1], {**lines[-1], **last}]


def test_an_earlier_finite_value_does_not_replace_a_non_finite_last_one(tmp_path: Path) -> None:
    odd = Replayed(records=lambda run: ended_with(**({"test_accuracy": math.nan} if run.seed else {})))
    results = compared(tmp_path, odd)
    ring = row(results, "ring")
    assert ring["numbers"]["final_metric"]["values"] == [1.0, None]
    assert ring["failed"] == "1 of 2 runs: its last test_accuracy is not finite"
    assert f"ring failed in {ring['failed']}." in results["verdict"]


def test_a_training_loss_does_not_pass_for_that_of_the_test(tmp_path: Path) -> None:
    odd = Replayed(records=lambda run: ended_with(test_loss=math.inf, loss=0.5))
    assert row(compared(tmp_path, odd), "ring")["numbers"]["final_loss"] is None


@pytest.mark.parametrize(
    ("rank", "name", "value"),
    [(0, "test_accuracy", None), (0, "test_accuracy", "0.9"), (1, "loss", None), (1, "samples", True)],
)
def test_a_value_that_is_no_number_is_refused_with_its_rank(rank: int, name: str, value: Any) -> None:
    records = [record(0.1), record(0.1)]
    records[rank] = [{**line, name: value} if line["step"] == 50 else line for line in records[rank]]
    words = rf"rank {rank} reported {name} = {value!r} after step 50; expected a number. Fix .*\({name}="
    with pytest.raises(UsageError, match=words):
        measured(*records)


def test_bits_per_character_reach_their_target_from_above() -> None:
    lines = [
        {**line, "bits_per_char": 10 - line["step"] / 20} if "epoch" in line else line for line in record(0.1)
    ]
    found = measured(lines, job=aimed(7.0, "char-lm"))
    assert found["seconds_to_target"] == pytest.approx(59 * 0.1 + 6 * 3.0)


def test_traffic_and_waiting_are_means_over_workers_by_step_and_staleness_has_its_worst() -> None:
    found = measured()
    assert (found["bytes_sent_per_step"], found["bytes_received_per_step"]) == (40, 60)
    assert found["exposed_ms"] == pytest.approx(5)
    assert (found["staleness_mean"], found["staleness_max"]) == (1.5, 5)


def test_the_greatest_staleness_is_that_of_all_seeds_in_the_last_line_too() -> None:
    numbers = {"staleness_max": Number.of([3.0, 4.0, 2.0]), "staleness_mean": Number.of([0.5, 0.7, 0.6])}
    told = RowResult(setting="n2 k1", row="hub-asp", synchronous=False, numbers=numbers)
    last = _result(replace(read(minimal()), rows=[told]), Path())
    assert (last["rows"][0]["staleness_max"], last["rows"][0]["staleness_mean"]) == (4.0, 0.6)


def test_the_greatest_staleness_is_that_of_all_turns() -> None:
    experiment = Experiment(job="digits", rows=("hub-asp",), seeds=(0,), repeats=3)
    (setting,), (row,) = experiment.settings, experiment.ways
    runs = counted(experiment, setting, row, 0)
    numbers: dict[str, Numbers] = {
        run.label: {**dict.fromkeys(NUMBERS, 1.0), "staleness_max": most}
        for run, most in zip(runs, (2.0, 9.0, 3.0), strict=True)
    }
    outcomes = {run.label: outcome_of(run=run) for run in runs}
    (told,) = JudgedRuns(experiment, outcomes, numbers, Judgement((), 1e-4)).rows
    assert told.numbers["staleness_max"] == Number.of([9.0])


def test_a_run_that_failed_half_way_has_no_end() -> None:
    found = measured(failed="the ring broke")
    assert (found["seconds"], found["final_loss"], found["final_metric"]) == (None, None, None)
    assert found["step_ms"] is not None


def test_the_exchange_of_warm_up_steps_counts_as_little_as_their_time() -> None:
    slow = [
        {**line, **{f"{name}seconds": line[f"{name}seconds"] + late for name in ("", "exposed_", "hidden_")}}
        for line in record(0.1, exposed=0.02, hidden=0.04)
        for late in [7.0 if line["step"] >= 3 else 0.0]
    ]
    found = measured(slow, slow, results=[{"exchange": EXCHANGE, "usage": USAGE}] * 2)
    assert found["exposed_ms"] == pytest.approx(20)
    assert found["compute_ms"] == pytest.approx(80)
    assert found["hidden_ms"] == pytest.approx(40)


def test_hidden_is_none_where_nobody_looked_and_where_a_peer_cannot_tell() -> None:
    told = [{"exchange": EXCHANGE, "usage": USAGE}]
    assert measured(record(0.1), results=told)["hidden_ms"] == pytest.approx(3)
    assert measured(record(0.1, hidden=None), results=told)["hidden_ms"] is None
    peer = [{"exchange": EXCHANGE | {"hidden_seconds": None}, "usage": USAGE}]
    assert measured(record(0.1), results=peer)["hidden_ms"] is None


def test_the_gate_s_record_is_counted_per_step() -> None:
    told = [{"exchange": EXCHANGE, "usage": USAGE, "audit": {"seconds": seconds}} for seconds in (0.2, 0.4)]
    assert measured(results=told)["record_ms"] == pytest.approx(3)  # of 100 steps
    assert measured()["record_ms"] is None


def test_parts_of_a_step_are_read_where_workers_and_shards_tell_them() -> None:
    result = {"exchange": EXCHANGE, "usage": USAGE}
    held = {"held_seconds": {"0": 0.04, "1": 0.06}}
    shards = [{"pushes": 50, "queued_seconds": 0.1, "handled_seconds": 0.3, **held}] * 2
    found = measured(record(0.1, exposed=0.07, hidden=0.01), results=[result], server={"shards": shards})
    assert {name: found[name] for name in ("compute_ms", "hidden_ms", "read_wait_ms")} == {
        "compute_ms": pytest.approx(30),
        "hidden_ms": pytest.approx(10),
        "read_wait_ms": pytest.approx(2),
    }
    assert found["queue_ms"] == pytest.approx(2)
    assert found["apply_ms"] == pytest.approx(6)
    assert found["cpu_ms_per_step"] == pytest.approx(50)
    assert found["memory_mb"] == 300.0


@pytest.mark.parametrize("lines", [[], record(0.1, steps=1)])
def test_a_record_without_steps_is_an_error(lines: list[Line]) -> None:
    with pytest.raises(HubringError, match="hub-bsp seed0: rank 1 recorded fewer than two steps"):
        measured(record(0.1), lines)


def test_curves_average_the_ranks_losses_and_count_everyones_samples(tmp_path: Path) -> None:
    found = next(each for each in compared(tmp_path)["curves"] if each["row"] == "ring")
    assert found["loss"][1] == {"seconds": pytest.approx(0.01), "samples": 128, "value": 1.0}
    assert found["metric"][0] == {"seconds": 0.0, "samples": 0, "value": 0.0}
    assert found["metric"][-1]["samples"] == 100 * 64


def test_a_long_curve_keeps_its_shape_in_few_points(tmp_path: Path) -> None:
    trainer = Replayed(records=lambda run: record(0.01, steps=1000, every=500))
    curve = compared(tmp_path, trainer, rows=("ring",), seeds=(0,))["curves"][0]["loss"]
    assert len(curve) == 334
    assert curve[0]["value"] == pytest.approx((2 + 1 + 2 / 3) / 3)


def test_repeats_with_one_seed_are_one_value(tmp_path: Path) -> None:
    trainer = Replayed(records=lambda run: record(0.01 * (1 + run.turn)))
    found = compared(tmp_path, trainer, rows=("ring",), seeds=(4,), repeats=3)
    assert row(found, "ring")["numbers"]["step_ms"]["values"] == [pytest.approx(20)]
    assert len(found["curves"]) == 1


def test_the_second_run_of_the_hub_counts_for_no_speed(tmp_path: Path) -> None:
    trainer = Replayed(records=lambda run: record(9.0 if run.turn else 0.01))
    assert row(compared(tmp_path, trainer), "hub-bsp")["numbers"]["step_ms"]["high"] == pytest.approx(10)

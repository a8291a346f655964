"""The words follow from the numbers, and claim no more than these show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hubring.workers.compare.plan.experiment import ComputeTable, FaultTable, LinkTable, StragglerTable
from hubring.workers.compare.plan.run_order import PlannedRun
from hubring.workers.compare.run.noise import RunNoise
from hubring.workers.compare.run.outcome import Line
from tests.support.compare.replayed import CALM, Replayed, paced, record, verdict


def test_the_verdict_names_the_first_row_to_the_target_and_the_margin(tmp_path: Path) -> None:
    said = verdict(tmp_path, paced({"ring": 0.02, "hub-bsp": 0.04, "local": 0.05, "hub-asp": 0.06}))
    assert "First to reach test accuracy 0.93 is ring, in 1.98 s; hub-bsp takes 2.00 times" in said


def test_the_row_that_is_first_takes_no_longer_than_another_by_the_same_mean(tmp_path: Path) -> None:
    # By medians the ring is first, and by the geometric means of which ratios are made hub-bsp is.
    seeds = {"ring": (1.0, 3.0, 1.0), "hub-bsp": (1.02, 1.02, 1.02)}
    said = verdict(tmp_path, paced({}, seeds), rows=("ring", "hub-bsp"))
    assert "First to reach test accuracy 0.93 are hub-bsp and ring, with no clear difference" in said


def test_rows_whose_whole_interval_is_nearly_1_are_even(tmp_path: Path) -> None:
    said = verdict(tmp_path, paced({"hub-asp": 0.5, "ring": 0.0101}), rows=("ring", "hub-bsp", "hub-asp"))
    assert (
        "First to reach test accuracy 0.93 are hub-bsp and ring, equally fast, in 0.99 to 1.00 s; hub-asp"
        in said
    )
    assert "The hub (hub-bsp) is as fast as the ring" in said


def test_rows_that_may_differ_by_half_are_not_told_apart_rather_than_even(tmp_path: Path) -> None:
    noisy = {"hub-bsp": (1 / 1.50, 1 / 1.60, 1 / 0.95), "ring": (1.0, 1 / 1.01, 1 / 1.02)}
    noisy["hub-asp"] = noisy["hub-bsp"]
    said = verdict(tmp_path, paced({}, noisy), rows=("ring", "hub-bsp", "hub-asp"))
    speeds = "9,600 images/s against 6,464, a factor of 1.30 (0.63 to 2.69) when paired by seed"
    assert f"No clear difference between the hub (hub-bsp) and the ring: {speeds}" in said
    assert "are hub-bsp, hub-asp and ring, with no clear difference, in 0.66 to 0.98 s." in said
    assert "as fast as the ring" not in said


def test_with_one_seed_nothing_is_even_and_nobody_beats_anybody(tmp_path: Path) -> None:
    said = verdict(tmp_path, paced({"ring": 0.0102}), seeds=(0,))
    assert "1.02; fewer than three seeds decide nothing." in said
    assert "beats" not in verdict(tmp_path, paced({"ring": 0.05}), seeds=(0,))


def test_a_target_reached_with_some_seeds_only_wins_no_race(tmp_path: Path) -> None:
    def records(run: PlannedRun) -> list[Line]:
        lines = record(0.001 if run.row.name == "hub-asp" else 0.02, pause=0.0)
        missed = (run.row.name, run.seed) == ("hub-asp", 1)
        return [{**line, "test_accuracy": 0.5} if missed and "epoch" in line else line for line in lines]

    said = verdict(tmp_path, Replayed(records=records))
    assert "hub-asp reached test accuracy 0.93 with only 2 of 3 seeds." in said
    assert "First to reach test accuracy 0.93 are local, ring and hub-bsp" in said


def test_one_process_alone_that_is_faster_is_named(tmp_path: Path) -> None:
    said = verdict(tmp_path, paced({"local": 0.001}))
    assert "loses to a single process with as many threads as each worker:" in said
    assert "the job is too small, or this machine has too few cores, to gain from several workers." in said


@pytest.mark.parametrize(
    "hindered", [{"link": LinkTable(rate=(1e8,))}, {"straggler": StragglerTable(seconds=(0.02,), ranks=(1,))}]
)
def test_a_loss_that_links_or_a_straggler_may_cause_is_not_blamed_on_a_small_job(
    tmp_path: Path, hindered: dict[str, Any]
) -> None:
    said = verdict(tmp_path, paced({"local": 0.001}), **hindered)
    assert "loses to a single process with as many threads as each worker:" in said
    assert "too small" not in said


def test_the_row_held_against_one_process_is_not_picked_by_its_speed(tmp_path: Path) -> None:
    said = verdict(tmp_path, paced({"local": 0.004, "ring": 0.005}))
    assert "hub-bsp loses to a single process" in said
    assert "a factor of 1.25 when paired by seed; faster than the single process: ring." in said
    assert "too small" not in said


def test_a_difference_that_may_be_rounding_comes_with_what_allows_more(tmp_path: Path) -> None:
    apart = {f"n2 k1 hub-bsp seed0{turn}": 1.01 for turn in ("", " turn1")}
    said = verdict(tmp_path, Replayed(parameters=apart), rows=("ring", "hub-bsp"), seeds=(0,))
    assert "If it is rounding, allow more with ps-compare report FOLDER --tolerance 0.001." in said
    asked = {"rows": ("ring", "hub-bsp"), "seeds": (0,), "tolerance": 0.001}
    assert "FOLDER --tolerance 0.01." in verdict(tmp_path / "more", Replayed(parameters=apart), **asked)


def test_a_hub_that_does_not_repeat_itself_is_no_matter_of_rounding(tmp_path: Path) -> None:
    apart = {"n2 k1 hub-bsp seed0 turn1": 1.01}
    said = verdict(tmp_path, Replayed(parameters=apart), rows=("ring", "hub-bsp"), seeds=(0,))
    assert "no difference is allowed" in said
    assert "tolerance" not in said


def test_the_verdict_states_its_limits(tmp_path: Path) -> None:
    compute = ComputeTable(step=(0.05,))
    said = verdict(tmp_path, paced({}), seeds=(0,), lr="per-worker", compute=compute)
    assert "Asynchronous rows used the job's learning rate divided by their number of workers" in said
    assert "Workers slept for part of every step" in said


def test_a_disturbed_machine_does_not_tell_who_is_first(tmp_path: Path) -> None:
    trainer = paced({"ring": 0.02, "hub-bsp": 0.04})
    trainer.noise = RunNoise((1.0, 1.0), 0.5, cores=(1.0, 1.0))
    said = verdict(tmp_path, trainer)
    assert "Not decided: which row is first to reach test accuracy 0.93, because" in said
    assert "First to reach" not in said


def by_straggler(slow: dict[str, float]) -> Callable[[PlannedRun], list[Line]]:
    """Steps of 10 ms, and what a straggler makes of them by row."""

    def records(run: PlannedRun) -> list[Line]:
        step = slow[run.row.name] if run.setting.straggler else 0.01
        return record(step * CALM[run.seed], pause=0.0)

    return records


def test_the_verdict_names_the_rows_that_a_straggler_slowed(tmp_path: Path) -> None:
    slow = {"ring": 0.03, "hub-bsp": 0.02, "hub-asp": 0.0101}
    table = StragglerTable(seconds=(0.02,), ranks=(1,), baseline=True)
    trainer = Replayed(records=by_straggler(slow))
    said = verdict(tmp_path, trainer, rows=tuple(slow), straggler=table)
    assert (
        "A delay of 20 ms per step on rank 1 makes steps of ring 3.00 and hub-bsp"
        " 2.00 times as long, but not of hub-asp."
    ) in said
    assert "times are those of an emulated machine" in said


def test_a_row_without_the_slow_worker_is_not_said_to_be_spared(tmp_path: Path) -> None:
    slow = {"local": 0.01, "ring": 0.01, "hub-bsp": 0.02}
    table = StragglerTable(seconds=(0.02,), ranks=(1,), baseline=True)
    said = verdict(tmp_path, Replayed(records=by_straggler(slow)), rows=tuple(slow), straggler=table)
    assert "makes steps of hub-bsp 2.00 times as long, but not of ring." in said


def test_a_straggler_whose_effect_varies_is_not_said_to_have_none(tmp_path: Path) -> None:
    def records(run: PlannedRun) -> list[Line]:
        factor = (0.9, 1.5, 1.6)[run.seed] if run.setting.straggler and run.row.name == "ring" else 1.0
        return record(0.01 * factor, pause=0.0)

    table = StragglerTable(seconds=(0.02,), ranks=(1,), baseline=True)
    trainer = Replayed(records=records)
    said = verdict(tmp_path, trainer, rows=("ring", "hub-bsp"), straggler=table)
    assert "A delay of 20 ms per step on rank 1 does not slow hub-bsp." in said
    assert (
        "With and without a delay of 20 ms per step on rank 1, steps show no clear difference:"
        " ring 1.29 (0.59 to 2.83) times as long."
    ) in said


def test_the_verdict_names_the_rows_that_failed_and_finished_after_a_loss(tmp_path: Path) -> None:
    trainer = Replayed(failed={"ring": "the ring broke"})
    said = verdict(tmp_path, trainer, rows=("ring", "hub-bsp"), fault=FaultTable(rank=1, step=9))
    assert "ring failed after worker 1 was lost at step 9, in 3 of 3 runs: the ring broke." in said
    assert "hub-bsp finished without worker 1." in said
    assert "images/s" not in said


def test_the_verdict_names_the_pause_and_the_repeated_steps_of_a_row(tmp_path: Path) -> None:
    def records(run: PlannedRun) -> list[Line]:
        lines = record(0.01, pause=0.0)
        if run.setting.fault is None or run.row.name != "hub-bsp":
            return lines
        return [{**line, "seconds": line["seconds"] + 1.5 * (line["step"] > 40)} for line in lines]

    fault = FaultTable(victim="shard", rank=0, step=40)
    said = verdict(tmp_path, Replayed(records=records), rows=("ring", "hub-bsp"), fault=fault)
    assert "hub-bsp finished after the loss of shard 0." in said
    assert "hub-bsp paused for 1.50 s and repeated 0 steps." in said
    assert "ring finished" not in said, "a ring has no shard"
    assert "ring paused" not in said
    assert "ring and hub-bsp finished" not in said


def test_steps_that_are_taken_again_are_lost(tmp_path: Path) -> None:
    def records(run: PlannedRun) -> list[Line]:
        lines = record(0.01, pause=0.0)
        again = [line for line in lines if line["step"] <= 30 or "epoch" not in line]
        return [
            *(line for line in again if line["step"] <= 40),
            *(line for line in again if line["step"] > 30),
        ]

    fault = FaultTable(victim="coordinator", step=40)
    said = verdict(tmp_path, Replayed(records=records), rows=("hub-bsp", "ring"), fault=fault)
    assert "repeated 10 steps." in said

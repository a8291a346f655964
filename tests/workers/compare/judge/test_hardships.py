"""The verdict says whom a straggler slowed and who survived a loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hubring.workers.compare.experiment.experiment import (
    FaultTable,
    StragglerTable,
)
from hubring.workers.compare.experiment.plan import Run
from hubring.workers.compare.run.outcome import Line
from tests.support.compare.paced import CALM, verdict
from tests.support.compare.replayed import Replayed, record


def by_straggler(slow: dict[str, float]) -> Callable[[Run], list[Line]]:
    """Steps of 10 ms, and what a straggler makes of them by row."""

    def records(run: Run) -> list[Line]:
        step = slow[run.row.name] if run.setting.straggler else 0.01
        return record(step * CALM[run.seed], pause=0.0)

    return records


def test_it_says_whom_a_straggler_slowed(tmp_path: Path) -> None:
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
    def records(run: Run) -> list[Line]:
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


def test_it_says_who_did_not_survive_a_loss_and_who_did(tmp_path: Path) -> None:
    trainer = Replayed(failed={"ring": "the ring broke"})
    said = verdict(tmp_path, trainer, rows=("ring", "hub-bsp"), fault=FaultTable(rank=1, step=9))
    assert "ring failed after worker 1 was lost at step 9, in 3 of 3 runs: the ring broke." in said
    assert "hub-bsp finished without worker 1." in said
    assert "images/s" not in said


def test_it_says_how_long_a_row_paused_and_what_it_lost(tmp_path: Path) -> None:
    def records(run: Run) -> list[Line]:
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
    def records(run: Run) -> list[Line]:
        lines = record(0.01, pause=0.0)
        again = [line for line in lines if line["step"] <= 30 or "epoch" not in line]
        return [
            *(line for line in again if line["step"] <= 40),
            *(line for line in again if line["step"] > 30),
        ]

    fault = FaultTable(victim="coordinator", step=40)
    said = verdict(tmp_path, Replayed(records=records), rows=("hub-bsp", "ring"), fault=fault)
    assert "repeated 10 steps." in said

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

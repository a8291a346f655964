"""The answer is one short sentence that says who won, by how much, and whether to trust it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hubring.workers.compare.plan.experiment import FaultTable, LinkTable, StragglerTable
from hubring.workers.compare.run.noise import RunNoise
from tests.support.compare.replayed import SEEDS, Replayed, compared, paced

TWICE = "is 2.00 times as fast as"
NOTHING = "This experiment measured no two rows that can be compared by speed alone."


def answer(folder: Path, trainer: Replayed, **changes: Any) -> str:
    found: str = compared(folder, trainer, **{"seeds": SEEDS, **changes})["answer"]
    assert all(len(sentence.split()) <= 25 for sentence in re.split(r"[.;] ", found)), found
    return found


@pytest.mark.parametrize(
    ("trainer", "changes", "said"),
    [
        (paced({"ring": 0.005}), {}, f"On this machine the ring {TWICE} hub-bsp for this job."),
        (paced({}), {}, "On this machine hub-bsp and ring are equally fast for this job, within 3%."),
        (
            paced({"ring": 0.02}),
            {"rows": ("ring", "ddp", "local")},
            f"On this machine ddp {TWICE} the ring for this job.",
        ),
        (
            paced({"ring": 0.005, "local": 0.001}),
            {"rows": ("ring", "hub-bsp", "local")},
            f"On this machine the ring {TWICE} the hub; one process alone is faster.",
        ),
        (
            paced({"ring": 0.005}),
            {"rows": ("ring", "hub-asp", "hub-bsp")},
            f"On this machine the ring {TWICE} hub-bsp for this job.",
        ),
        (
            paced({"ring": 0.02}),
            {"seeds": (0,)},
            "Not decided between hub-bsp and ring: run at least three seeds.",
        ),
        (
            paced({"ring": 0.02}),
            {"workers": (4,), "link": LinkTable(rate=(1e9,))},
            f"On emulated hosts hub-bsp {TWICE} the ring for this job.",
        ),
        (
            paced({"ring": 0.02}),
            {"workers": (2, 4)},
            "Of 2 settings, hub-bsp beats the ring in 2, by a factor of 2.00.",
        ),
        (paced({}), {"rows": ("ring",)}, NOTHING),
        (paced({}), {"fault": FaultTable(rank=1, step=9)}, NOTHING),
        (paced({"hub-asp": 0.001}), {"rows": ("hub-asp", "ring")}, NOTHING),
        (paced({"ring-int8": 0.001}), {"rows": ("ring", "ring-int8")}, NOTHING),
    ],
)
def test_the_answer_names_the_winner_and_the_margin(
    tmp_path: Path, trainer: Replayed, changes: dict[str, Any], said: str
) -> None:
    assert answer(tmp_path, trainer, **changes) == said


def test_a_difference_that_chance_can_explain_has_no_winner(tmp_path: Path) -> None:
    noise = {"ring": (1.16, 1.01, 1.06, 1.03, 1.13), "hub-bsp": (1.0,) * 5}
    changes = {"rows": ("ring", "hub-bsp"), "seeds": tuple(range(5)), "target": 2.0}
    said = answer(tmp_path, paced({}, noise), **changes)
    assert said.startswith("On this machine hub and ring show no clear difference for this job; ")
    assert said.endswith(" seeds would decide it in 4 of 5 cases.")


def test_a_disturbed_machine_has_no_winner(tmp_path: Path) -> None:
    trainer = paced({"ring": 0.005})
    trainer.noise = RunNoise((0.0, 0.0), 0.4, cores=(1.0, 0.8))
    said = "other programs used 0.8 cores and the run 1.0 in 3 of 3 runs of hub-bsp"
    assert answer(tmp_path, trainer) == f"Not decided between hub-bsp and ring: {said}."


def test_rows_that_do_not_compute_the_same_have_no_winner(tmp_path: Path) -> None:
    trainer = Replayed(parameters={f"n2 k1 ring seed{seed}": 1.5 for seed in SEEDS})
    said = answer(tmp_path, trainer, rows=("ring", "hub-bsp"))
    assert said == "No row is called faster, because rows that should compute the same do not: see the gate."


def test_without_the_ring_s_speed_an_asynchronous_hub_does_not_take_its_place(tmp_path: Path) -> None:
    trainer = paced({"hub-ssp": 0.001})
    trainer.parameters = {f"n2 k1 ring seed{seed}": 1.5 for seed in SEEDS}
    said = answer(tmp_path, trainer, rows=("ring", "hub-ssp", "hub-bsp", "local"))
    sooner = "To reach test accuracy 0.93, hub-ssp is 10.00 times as fast as hub-bsp and local."
    assert said == f"{sooner} On this machine hub-bsp {TWICE} local for this job."


def test_a_row_that_does_not_wait_for_all_is_named_where_it_reaches_the_target_first(tmp_path: Path) -> None:
    slow = StragglerTable(kind="constant", seconds=(0.02,), baseline=True)
    said = answer(tmp_path, paced({"hub-asp": 0.001}), rows=("ring", "hub-bsp", "hub-asp"), straggler=slow)
    sooner = "hub-asp is 10.00 times as fast as hub-bsp and ring"
    assert said == (
        f"To reach test accuracy 0.93, {sooner} in the base setting;"
        f" {sooner} with a delay of 20 ms per step on every rank."
        " No clear winner in 2 settings: both are equally fast in 2."
    )

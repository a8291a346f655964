"""The gate judges recorded steps beside the pairs, and reports both."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from hubring.ps.core.errors import HubringError
from hubring.workers.compare.findings import Findings
from hubring.workers.compare.gate.same_parameters import judge
from hubring.workers.compare.plan.run_order import PlannedRun, runs
from hubring.workers.compare.run.outcome import RunOutcome, audit_file
from hubring.workers.compare.show.page import page
from hubring.workers.compare.show.screen import notes
from hubring.workers.compare.statistics import Repeat
from tests.support.compare.audited import Script, Trained, train
from tests.support.compare.correct_scripts import in_bfloat16, normalized, stepped
from tests.support.compare.planted import PLANTED
from tests.support.compare.replayed import Replayed, experiment, findings
from tests.support.compare.unusual_scripts import UNUSUAL
from tests.support.pages.html_tree import html_tree

pytestmark = pytest.mark.slow

ROWS = ("local", "ring", "hub-bsp")


@dataclass
class Audited(Replayed):
    """Runs with recorded steps, by row."""

    trained: dict[str, Trained] = field(default_factory=dict)

    def run(self, run: PlannedRun, folder: Path, progress: Any) -> RunOutcome:
        left = Replayed.run(self, run, folder, progress)
        self.trained[run.row.name].save(folder)
        return left


def judged(folder: Path, trained: dict[str, Trained], finals: dict[str, float] | None = None) -> Findings:
    """Findings of one seed, with these recordings and final parameters."""
    return findings(folder, Audited(parameters=finals or {}, trained=trained), rows=ROWS, seeds=(0,))


SCRIPTS = {
    "plain": Script(steps=30),
    "short": Script(steps=3),
    "batch norm": Script(normalized),
    "momentum zeroed": UNUSUAL["momentum zeroed"],
}
"""Those that several tests train."""


@cache
def known(row: str, name: str) -> Trained:
    return train(row, SCRIPTS[name])


def all_rows(script: str | Script) -> dict[str, Trained]:
    """Every row's training; that of a named script is made once."""
    return {row: known(row, script) if isinstance(script, str) else train(row, script) for row in ROWS}


def entry(found: Findings, name: str) -> Any:
    return next(each for each in found.rows if each.row == name)


def test_a_fault_after_the_first_steps_withholds_the_speed(tmp_path: Path) -> None:
    trained, planted = all_rows("plain"), PLANTED["a rank sends nothing in every 25th step"]
    with planted.plant():
        trained["ring"] = train("ring", planted.script)
    found = judged(tmp_path, trained)
    assert all(pair.passed for pair in found.gate.pairs)
    assert not found.gate.passed
    assert entry(found, "ring").withheld.startswith("step 25 of ring is wrong (seed 0): the gradient of")
    assert [each.row for each in found.rows if each.withheld] == ["ring"]
    made = page(found)
    assert "as if rank 1 had sent nothing" in made
    assert "computed the same, as they should. " in made
    assert "Can you trust this? Not yet. Some of " in made
    assert " steps were wrong: see Gate." in made
    text = " ".join(html_tree(made).text.split())
    assert "Yes. 3 of 3 pairs agree." in text
    assert "No. 3 of 4 runs have no step in which a fault was found." in text
    alone = {name: trained[name] for name in ("ring", "hub-bsp")}
    both = findings(tmp_path / "two", Audited(trained=alone), rows=("ring", "hub-bsp"), seeds=(0,))
    assert both.answer == "No row is called faster, because ring took wrong steps: see the gate."


@pytest.mark.parametrize("script", ["batch norm", Script(normalized, take=in_bfloat16)])
def test_where_only_local_differs_by_right_the_gate_gives_advice(
    tmp_path: Path, script: str | Script
) -> None:
    found = judged(tmp_path, all_rows(script), {"n2 k1 local seed0": 1.5})
    assert found.gate.passed
    assert not any(each.withheld for each in found.rows)
    advice = [pair.advice for pair in found.gate.pairs if pair.advice]
    assert len(advice) == 2
    assert "BatchNorm" in advice[0]
    assert advice[0] in found.verdict
    assert ("ring", "hub-bsp") in [(pair.first, pair.second) for pair in found.gate.pairs]
    made = page(found)
    assert "computed the same, as they should. 2 pairs differ by right: see Gate." in made
    assert "Yes. 2 of 4 pairs agree, and 2 differ by right." in " ".join(html_tree(made).text.split())


def test_batch_norm_does_not_excuse_a_hub_that_differs_from_the_ring(tmp_path: Path) -> None:
    finals = {"n2 k1 local seed0": 1.5, "n2 k1 ring seed0": 1.2}
    found = judged(tmp_path, all_rows("batch norm"), finals)
    assert not found.gate.passed
    assert {each.row for each in found.rows if each.withheld} == {"ring", "hub-bsp"}


def test_without_a_reason_local_is_right(tmp_path: Path) -> None:
    found = judged(tmp_path, all_rows("plain"), {"n2 k1 local seed0": 1.5})
    assert {each.row for each in found.rows if each.withheld} == {"ring", "hub-bsp"}
    assert any(text.startswith("Each step by itself is what one process makes") for text in found.verdict)


def test_uneven_batches_without_a_single_process_are_advice(tmp_path: Path) -> None:
    trained = {name: train(name, Script(last=7)) for name in ("ring", "hub-bsp")}
    found = findings(tmp_path, Audited(trained=trained), rows=("ring", "hub-bsp"), seeds=(0,))
    assert found.gate.passed
    assert "Add the row local to check this." in next(each.advice for each in found.gate.steps)


def test_rows_of_an_earlier_version_have_no_samples_to_compare(tmp_path: Path) -> None:
    script = PLANTED["ranks train on the same samples"].script
    trained = {name: train(name, script).without_samples() for name in ("ring", "hub-bsp")}
    found = findings(tmp_path, Audited(trained=trained), rows=("ring", "hub-bsp"), seeds=(0,))
    assert found.gate.passed
    assert any(text.startswith("The samples of some runs were not recorded") for text in found.verdict)


def test_parameters_that_change_between_steps_in_one_row_only_are_a_fault(tmp_path: Path) -> None:
    def changing(training: Any) -> None:
        if training.number == 6 and training.communicator.topology == "ring":
            training.model[2].bias.data.mul_(1.001)

    found = judged(tmp_path, all_rows(Script(before=changing)))
    assert "step 6 of ring is wrong" in entry(found, "ring").withheld
    assert entry(found, "hub-bsp").withheld is None


def reloading(training: Any) -> None:
    """Loads the optimizer's own state, halfway: nothing changes, but a step cannot tell."""
    if training.number == 6:
        training.optimizer.load_state_dict(training.optimizer.state_dict())


@pytest.mark.parametrize("script", [Script(optimizer=stepped), Script(before=reloading)])
@pytest.mark.parametrize("rows", [ROWS, ("hub-bsp",)])
def test_a_state_that_is_loaded_is_not_replayed(
    tmp_path: Path, script: Script, rows: tuple[str, ...]
) -> None:
    trained = {name: train(name, script) for name in rows}
    found = findings(tmp_path, Audited(trained=trained), rows=rows, seeds=(0,))
    assert found.gate.passed
    for step in found.gate.steps:
        assert step.unjudged == "its optimizer's state was loaded or cleared"


def test_a_step_that_is_unusual_in_a_single_process_is_replayed_in_no_row(tmp_path: Path) -> None:
    found = judged(tmp_path, all_rows("momentum zeroed"))
    assert found.gate.passed
    for step in found.gate.steps:
        assert (step.judged, step.fault) == (0, "")
        assert "does not know (step 6: the update of" in step.unjudged
    assert any("local, ring and hub-bsp were not replayed" in text for text in found.verdict)


def test_the_exchange_is_judged_where_updates_are_not_replayed(tmp_path: Path) -> None:
    trained, planted = all_rows("momentum zeroed"), PLANTED["a rank sends nothing once, on a ring"]
    with planted.plant():
        trained["ring"] = train("ring", SCRIPTS["momentum zeroed"])
    found = judged(tmp_path, trained)
    assert "as if rank 1 had sent nothing" in entry(found, "ring").withheld
    assert entry(found, "local").withheld is None


def test_local_is_the_reference_wherever_it_stands(tmp_path: Path) -> None:
    rows = ("ring", "local", "hub-bsp")
    trainer = Audited(parameters={"n2 k1 local seed0": 1.5}, trained=all_rows("batch norm"))
    found = findings(tmp_path, trainer, rows=rows, seeds=(0,))
    assert found.gate.passed
    assert not any(each.withheld for each in found.rows)
    assert {pair.first for pair in found.gate.pairs if pair.limit} == {"local", "ring"}


def test_a_higher_tolerance_does_not_loosen_the_check_of_a_step(tmp_path: Path) -> None:
    planted = PLANTED["a hub is off by one percent"]
    trained = all_rows(planted.script)
    with planted.plant():
        trained["hub-bsp"] = train("hub-bsp", planted.script)
    found = findings(tmp_path, Audited(trained=trained), rows=ROWS, seeds=(0,), tolerance=0.1)
    assert "is off by 0.01 of its size" in entry(found, "hub-bsp").withheld


def test_each_run_is_named_before_its_steps_are_judged_on_one_thread(tmp_path: Path) -> None:
    asked = experiment(rows=("local", "ring"), seeds=(0,))
    trainer = Audited(trained={name: known(name, "short") for name in ("local", "ring")})
    outcomes = {run.label: trainer.run(run, tmp_path / run.label, lambda _: None) for run in runs(asked)}
    named, threads = list[str](), list[int]()

    def checking(label: str) -> None:
        named.append(label)
        threads.append(torch.get_num_threads())

    before = torch.get_num_threads()
    judge(asked, outcomes, checking)
    assert named[:2] == ["n2 k1 local seed0", "n2 k1 ring seed0"]
    assert set(threads) == {1}
    assert torch.get_num_threads() == before


def test_end_drift_is_on_the_page_and_on_the_terminal(tmp_path: Path) -> None:
    trained = all_rows("short")
    saved = Audited(parameters={"n2 k1 ring seed0": 1.01}, trained=trained, early=1.0)
    found = findings(tmp_path, saved, rows=ROWS, seeds=(0,))
    text = "End drift, the largest differences after the last step, from local: ring 0.01, hub-bsp 0."
    assert text in " ".join(notes(found))
    assert text in page(found)


def test_a_damaged_recording_is_an_error_that_names_it(tmp_path: Path) -> None:
    class Damaged(Audited):
        def run(self, run: PlannedRun, folder: Path, progress: Any) -> RunOutcome:
            left = Audited.run(self, run, folder, progress)
            audit_file(folder, 0).write_bytes(b"\x03\0\0\0abc")
            return left

    with pytest.raises(HubringError, match=r"audit 0.msgpack is damaged"):
        findings(tmp_path, Damaged(trained=all_rows("short")), rows=ROWS, seeds=(0,))


def test_the_first_screen_speaks_of_the_gate_and_of_both_repeats_and_limit(tmp_path: Path) -> None:
    trained = {"ring": known("ring", "short")}
    found = findings(tmp_path, Audited(trained=trained), rows=("ring",), seeds=(0,))
    assert not found.gate.pairs
    made = page(found)
    assert "3 of 3 updates were repeated in one process, and none was wrong." in made
    assert "computed the same" not in made
    repeat = Repeat("n2 k1", "ring", [1.01, 1 / 1.01, 1.01])  # they do not cancel out
    noisy = replace(found, noise=replace(found.noise, repeat=repeat))
    said = page(noisy)
    assert "Run twice with each seed, ring differed from itself by 1.0% on average; differences" in said
    assert "on average; differences below 3.0% do not count." in said
    repeat = Repeat("n2 k1", "ring", [1.2, 1.2, 1.2])
    scattered = page(replace(found, noise=replace(found.noise, repeat=repeat)))
    assert "on average; as these repeats scatter, differences below 20.0% do not count." in scattered

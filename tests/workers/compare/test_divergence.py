"""A run that diverges is a result of its own, told beside those of the others; other failures end all."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hubring.ps.core.errors import NonFinite
from hubring.workers.compare.plan.experiment import FaultTable
from hubring.workers.compare.plan.row import ROWS
from hubring.workers.compare.plan.run_order import PlannedRun
from hubring.workers.compare.plan.setting import Setting
from hubring.workers.compare.run.outcome import Line, RunOutcome, divergence, read
from hubring.workers.compare.run.runner import Runner
from hubring.workers.compare.run.site import ThisMachine
from hubring.workers.peers.processes import LocalProcess, ProcessFailed, StartProgram
from tests.support.compare.replayed import Replayed, carried_out, experiment, record, row
from tests.support.pages.html_tree import html_tree

ERROR = f"rank 1's gradient holds nan; {NonFinite.fix} (train.py line 9)"
LAST = {"steps": 41, "exit_code": 1, "error": ERROR}
SAID = "diverged after 41 steps; worker 1 reported: rank 1's gradient holds nan"


@dataclass
class Diverging(Replayed):
    """Some runs, by label, diverge: all but the last two reports of theirs are there, and no parameters."""

    diverging: Collection[str] = ()
    left: Callable[[PlannedRun], list[Line]] = field(default=lambda run: record(0.01)[:-2])

    def run(self, run: PlannedRun, folder: Path, progress: Callable[[Line], None]) -> RunOutcome:
        whole = Replayed.run(self, run, folder, progress)
        if run.label not in self.diverging:
            return whole
        for rank in range(2):
            text = "".join(f"{json.dumps(line)}\n" for line in self.left(run))
            (folder / f"record {rank}.jsonl").write_text(text)
        whole.parameters.unlink()
        results = [{}, LAST]
        outcome = replace(whole, results=results, failed=divergence(results, None))
        outcome.write()
        return outcome


def page_text(folder: Path) -> str:
    return html_tree((folder / "report.html").read_text()).text


def test_a_divergence_is_reported_without_the_fix() -> None:
    assert divergence([{"steps": 50}, LAST], {"error": ERROR}) == SAID
    assert divergence([None, {}], {"steps": 41, "error": ERROR}) == SAID.replace("worker 1", "server")


@pytest.mark.parametrize("lines", [[], record(0.01)[:1], record(0.01)[:-2]], ids=["none", "one", "many"])
def test_a_run_that_diverges_is_reported_and_the_others_are_compared(
    tmp_path: Path, lines: list[Line]
) -> None:
    trainer = Diverging(diverging=["n2 k1 hub-asp seed1"], left=lambda run: lines)
    results, heard = carried_out(tmp_path, trainer)
    assert f"n2 k1 hub-asp seed1 {SAID}" in heard.warnings
    asp = row(results, "hub-asp")
    assert asp["failed"] == f"1 of 2 runs: {SAID}"
    assert asp["numbers"]["final_metric"]["values"] == [1.0, None]
    assert asp["numbers"]["samples_per_second"] is None
    assert results["verdict"][0] == f"hub-asp failed in 1 of 2 runs: {SAID}."
    assert row(results, "ring")["numbers"]["samples_per_second"] is not None
    assert SAID in (tmp_path / "report.html").read_text().replace("&#x27;", "'").replace("&#39;", "'")


def test_a_seed_that_diverged_does_not_end_the_line_of_its_row(tmp_path: Path) -> None:
    results, _ = carried_out(tmp_path, Diverging(diverging=["n2 k1 hub-asp seed1"]))
    drawn = [each["seed"] for each in results["curves"] if each["row"] == "hub-asp"]
    assert drawn == [0]
    text = page_text(tmp_path)
    assert "Line and band of hub-asp are of 1 of 2 seeds." in text
    assert "Not drawn" not in text


def test_a_row_that_diverged_with_every_seed_is_named_as_such_where_it_is_not_drawn(tmp_path: Path) -> None:
    carried_out(tmp_path, Diverging(diverging=[f"n2 k1 hub-asp seed{seed}" for seed in (0, 1)]))
    assert "Not drawn: hub-asp (failed)." in page_text(tmp_path)


def test_a_row_that_the_fault_leaves_alone_does_not_fail_after_it(tmp_path: Path) -> None:
    fault = FaultTable(victim="shard", step=40)
    results, _ = carried_out(tmp_path, Diverging(diverging=["n2 k1 ring seed1"]), fault=fault)
    assert f"ring failed in 1 of 2 runs: {SAID}." in results["verdict"]


def test_where_the_reference_diverged_the_next_row_is_measured_against(tmp_path: Path) -> None:
    trainer = Diverging(diverging=["n2 k1 ring seed1", "n2 k1 hub-bsp seed0 turn1"])
    rows = ("ring", "hub-bsp", "hub-aggregate")
    pairs = carried_out(tmp_path, trainer, rows=rows)[0]["gate"]["pairs"]
    assert [(pair["seed"], pair["first"], pair["second"]) for pair in pairs] == [
        (0, "ring", "hub-bsp"),
        (0, "ring", "hub-aggregate"),
        (1, "hub-bsp", "hub-aggregate"),
        (1, "hub-bsp", "hub-bsp again"),
    ]


@dataclass(frozen=True, slots=True)
class Scripted(ThisMachine):
    """Starts a piece of Python in place of every program."""

    code: str
    _fork_servers = None

    def starter(self, threads: int) -> StartProgram:
        return lambda name, command, folder, environment: LocalProcess(
            name, [sys.executable, "-c", self.code], folder, environment
        )


def scripted(folder: Path, last: dict[str, Any], **changes: Any) -> RunOutcome:
    """What is left of a run of one process that ends so."""
    code = f"import sys; print({json.dumps(last)!r}); print('the cause', file=sys.stderr); sys.exit(1)"
    run = PlannedRun(Setting(workers=2), ROWS["local"], seed=0)
    return Runner(experiment(**changes), site=Scripted(code)).run(run, folder / "run", lambda line: None)


def test_a_process_that_ends_by_diverging_leaves_an_outcome(tmp_path: Path) -> None:
    left = scripted(tmp_path, LAST)
    assert left.failed == SAID.replace("worker 1", "worker 0")
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["failed"] == left.failed


def test_a_run_records_which_version_of_the_script_it_ran(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print()")
    own = {"job": None, "script": script, "metric": "loss", "arguments": ("{seed}",)}
    left = scripted(tmp_path, LAST, **own)
    assert left.script == hashlib.sha256(b"print()").hexdigest()
    assert read(left.folder, left.run).script == left.script


def test_a_process_that_fails_otherwise_ends_the_comparison_whatever_its_words(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match=r"(?s)worker 0 exited with 1.*the cause"):
        scripted(tmp_path, {**LAST, "error": "RuntimeError: nan is not finite, training diverged"})
    assert not (tmp_path / "run" / "outcome.json").exists()

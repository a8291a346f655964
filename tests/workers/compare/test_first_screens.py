"""A stranger finds in the first three lines who won, by how much, and whether to trust it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hubring.ps.config import terminal
from hubring.workers.compare import cli
from hubring.workers.compare.findings import Findings, decode, encode
from hubring.workers.compare.plan.run_order import PlannedRun
from hubring.workers.compare.run.outcome import Line, RunOutcome
from hubring.workers.compare.show.page import page
from hubring.workers.compare.show.screen import show
from hubring.workers.peers.processes import ProcessFailed
from tests.support.compare.first_screens import screens
from tests.support.compare.replayed import SEEDS, Replayed, carried_out, findings, paced, record
from tests.support.pages.html_tree import html_tree

YES, NOT_YET = "Can you trust this? Yes. ", "Can you trust this? Not yet. "


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Findings]:
    return dict(screens(tmp_path_factory.mktemp("screens")))


def lines(found: Findings, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Returns the first two lines of the page, after a look at the terminal's last three."""
    show(found, Path("report.html"))
    answer, trust, _ = capsys.readouterr().err.splitlines()[-3:]
    head = html_tree(page(found)).one("header")
    shown = [head.one("h1").text, *(each.text for each in head.all("p"))]
    first, kicker, second, *_ = (each.replace("\N{NO-BREAK SPACE}", " ") for each in shown)
    assert "ps-compare" in kicker
    assert (first, second) == (answer, trust)
    return answer, trust


@pytest.mark.parametrize(
    ("name", "answer", "trust", "code"),
    [
        (
            "diverged",
            "No row is called faster, because ring failed.",
            f"{NOT_YET}ring failed in 3 of 3 runs: diverged after 41 steps; worker 1 reported: ",
            1,
        ),
        (
            "disturbed",
            "Not decided between hub-bsp and ring: other programs used 0.8 cores",
            f"{NOT_YET}Some runs were disturbed. Repeat the experiment on a quiet machine.",
            0,
        ),
        ("null", "On this machine hub-bsp and ring are equally fast for this job", YES, 0),
        ("winner", "On this machine hub-bsp is 1.31 times as fast (1.28 to 1.34) as the ring", YES, 0),
        (
            "samples",
            "No row is called faster, because ring trained with 704 samples in 22 steps",
            f"{NOT_YET}No speed is shown for ring: ",
            1,
        ),
        (
            "settings",
            "Of 2 settings, both are equally fast in 1 (links of 1 Gbit/s); the hub beats the ring in 1"
            " (links of 100 Mbit/s), by a factor of 1.30.",
            YES,
            0,
        ),
    ],
)
def test_the_first_lines_say_who_won_by_how_much_and_whether_to_trust_it(
    made: Mapping[str, Findings],
    capsys: pytest.CaptureFixture[str],
    name: str,
    answer: str,
    trust: str,
    code: int,
) -> None:
    first, second = lines(made[name], capsys)
    assert first.startswith(answer)
    assert second.startswith(trust)
    assert ("Next: fix the row" in second) == (code == 1)
    assert cli._exit_code(made[name]) == code


def test_the_table_of_disturbed_runs_has_no_factors(made: Mapping[str, Findings]) -> None:
    table = html_tree(page(made["disturbed"])).one("header").one("table")
    assert ["not decided" in line.text for line in table.all("tr")] == [False, True, True, True]


class Crashing(Replayed):
    """A run of which a worker crashes."""

    crashing: str = "n2 k1 ring seed1"

    def run(self, run: PlannedRun, folder: Path, progress: Callable[[Line], None]) -> RunOutcome:
        if run.label == self.crashing:
            folder.mkdir(parents=True)
            (folder / "record 0.jsonl").write_text('{"step": 1, "seconds": 0.01, "samples": 32}\n')
            raise ProcessFailed("worker 0 exited with 9; the end of worker 0.err:\n  out of memory")
        return Replayed.run(self, run, folder, progress)


FOUR = (0, 1, 2, 3)


def steady(run: PlannedRun) -> list[Line]:
    return record((0.02 if run.row.name == "ring" else 0.01) * (1 + run.seed / 50), pause=0.0)


def test_a_crash_in_one_seed_is_named_and_the_other_seeds_count(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"rows": ("ring", "hub-bsp"), "seeds": FOUR}
    results, heard = carried_out(tmp_path, Crashing(records=steady), **asked)
    assert results["answer"] == "On this machine the hub is 2.00 times as fast as the ring for this job."
    said = "ring failed in 1 of 4 runs: crashed: worker 0 exited with 9"
    assert f"{said}; the other runs count." in results["verdict"]
    found = decode((tmp_path / "results.json").read_bytes())
    assert f"{NOT_YET}{said}" in html_tree((tmp_path / "report.html").read_text()).text.replace("\xa0", " ")
    assert cli._exit_code(found) == 1
    assert any("out of memory" in warning and "delete" in warning for warning in heard.warnings)
    (ring,) = (row for row in found.rows if row.row == "ring")
    speed = ring.number("samples_per_second")
    assert speed is not None
    assert [value is None for value in speed.values] == [False, True, False, False]


def test_a_crash_in_a_row_s_first_run_ends_the_comparison(tmp_path: Path) -> None:
    trainer = Crashing(records=steady)
    trainer.crashing = "n2 k1 ring seed0"
    with pytest.raises(ProcessFailed):
        carried_out(tmp_path, trainer, rows=("ring", "hub-bsp"), seeds=FOUR)


def test_a_row_with_a_failed_run_beats_no_other(tmp_path: Path) -> None:
    found = findings(tmp_path, NeverFinite(), rows=("ring", "hub-bsp", "local", "hub-asp"), seeds=SEEDS)
    said = "\n".join(found.verdict)
    assert "ring failed in 1 of 3 runs: its last test_accuracy is not finite." in said
    assert "ring" not in found.answer
    assert not any("beats the ring" in each or "loses to the ring" in each for each in found.verdict)
    assert "ring takes" not in said
    assert cli._exit_code(found) == 1


class NeverFinite(Replayed):
    """The ring is twice as fast as the others, and its last metric with one seed is not a number."""

    def __init__(self) -> None:
        super().__init__(records=self._record)

    @staticmethod
    def _record(run: PlannedRun) -> list[Line]:
        lines = record((0.005 if run.row.name == "ring" else 0.01) * (1 + run.seed / 50), pause=0.0)
        last = {**lines[-1], "test_accuracy": float("nan")}
        return [*lines[:-1], last] if (run.row.name, run.seed) == ("ring", 1) else lines


def test_a_script_that_changed_withholds_the_headline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = findings(tmp_path / "runs", paced({"ring": 0.02}), rows=("ring", "hub-bsp"), seeds=SEEDS)
    assert "2.00 times" in found.answer
    (tmp_path / "train.py").write_text("# first")
    trainer = paced({"ring": 0.02})
    trainer.script = tmp_path / "train.py"
    records = trainer.records

    def edited(run: PlannedRun) -> list[Line]:
        (tmp_path / "train.py").write_text(f"# {run.row.name}")
        return records(run)

    trainer.records = edited
    changed = findings(tmp_path / "changed", trainer, rows=("ring", "hub-bsp"), seeds=SEEDS)
    why = "changed between runs: n2 k1 ring seed0 and n2 k1 hub-bsp seed0 ran different versions of it."
    first, second = lines(decode(encode(changed)), capsys)
    assert first.startswith("Not decided between hub and ring: ")
    assert first.endswith(why)
    assert second.startswith(NOT_YET)
    assert why in second
    assert "2.00 times" not in "\n".join(changed.verdict)


def test_a_fast_asynchronous_row_has_a_sentence_though_the_target_was_missed(tmp_path: Path) -> None:
    trainer = paced({"hub-asp": 0.01 / 3})
    found = findings(tmp_path, trainer, rows=("hub-bsp", "hub-asp"), seeds=SEEDS, target=2.0)
    assert (
        "hub-asp processes samples 3.00 times as fast as hub-bsp, and their results show no clear difference."
        in found.verdict
    )


def test_settings_without_a_winner_have_their_reasons(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"rows": ("ring", "hub-bsp"), "workers": (2, 4)}
    noise = {"ring": (1.5, 1.0, 1.3)}
    found = findings(tmp_path / "open", paced({}, noise), seeds=SEEDS, **asked)
    assert found.answer == "No clear winner in 2 settings: there is no clear difference in 2."
    steps = {"ring": (1.16, 1.01, 1.06, 1.03, 1.13), "hub-bsp": (1.0,) * 5}
    found = findings(tmp_path / "seeds", paced({}, steps), seeds=tuple(range(5)), target=2.0, **asked)
    assert found.answer == (
        "No clear winner in 2 settings: there is no clear difference in 2;"
        " 31 seeds would decide it in 4 of 5 cases."
    )
    found = findings(tmp_path / "two", paced({"ring": 0.02}), seeds=(0, 1), **asked)
    few = "No clear winner in 2 settings: nothing is decided in 2, because it takes three seeds."
    assert found.answer == few


def test_a_range_that_excludes_1_says_why_it_decides_nothing(tmp_path: Path) -> None:
    rows = ("ring", "hub-bsp", "hub-shm", "hub-zmq", "ddp", "local")
    noise = dict.fromkeys(rows, (1.0, 1.0, 1.0)) | {"ring": (1.10, 1.06, 1.07)}
    found = findings(tmp_path, paced({}, noise), rows=rows, seeds=SEEDS)
    assert "show no clear difference: the factor's range (1.0" in found.answer
    assert "excludes 1, but so can chance in " in found.answer
    assert "; the range excludes 1, but so can chance in one of " in "\n".join(found.verdict)


def test_steps_that_drift_within_a_run_are_named(tmp_path: Path) -> None:
    def drifting(run: PlannedRun) -> list[Line]:
        lines = record(0.01, pause=0.0)
        if (run.row.name, run.seed) != ("ring", 1):
            return lines
        late = [0.01 * max(0, line["step"] - 50) for line in lines]
        return [{**line, "seconds": line["seconds"] + more} for line, more in zip(lines, late, strict=True)]

    found = findings(tmp_path / "drift", Replayed(records=drifting), rows=("ring", "hub-bsp"), seeds=SEEDS)
    (said,) = (each for each in found.verdict if "drifted" in each)
    assert said == (
        "Step times drifted within runs. A step of the last third took, as a multiple of one of the first:"
        " 2.00 in ring (seed 1, n2 k1)."
    )
    assert said in html_tree(page(found)).text
    steady = findings(tmp_path / "steady", paced({}), rows=("ring", "hub-bsp"), seeds=SEEDS)
    assert not any("drifted" in each for each in steady.verdict)


def test_results_of_an_earlier_version_still_load(made: Mapping[str, Findings]) -> None:
    text = encode(made["winner"]).replace(b'"partly": false,', b"")
    assert b"partly" not in text
    assert decode(text) == made["winner"]


@pytest.mark.parametrize(("name", "code"), [("diverged", 1), ("winner", 0)])
def test_a_comparison_in_which_a_row_diverged_exits_with_1(
    made: Mapping[str, Findings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    code: int,
) -> None:
    monkeypatch.setattr(cli, "_run", lambda *_: made[name])
    with pytest.raises(SystemExit) as ended:
        terminal.run(cli.app, "ps-compare", ("run", "--alone", "--out", str(tmp_path)))
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert ended.value.code == last["exit_code"] == code
    assert [row["row"] for row in last["rows"] if row["failed"]] == (["ring"] if code else [])

"""The terminal's table, made from the results alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from hubring.workers.compare.experiment.setting import Setting
from hubring.workers.compare.figures import PART, figures
from hubring.workers.compare.output.exchange_table import HEADS, exchanges
from hubring.workers.compare.output.screen import show
from hubring.workers.compare.output.table import columns, lines, notes
from hubring.workers.compare.page import page as render
from hubring.workers.compare.result.findings import Number
from tests.support.compare.results import EMULATED, GIGABIT, full, minimal, read, summary
from tests.support.pages.html_tree import html_tree

GIGABIT_KEY = Setting(workers=4, link=GIGABIT).key


def test_every_row_has_a_cell_for_every_column() -> None:
    findings = read(full())
    for setting in findings.setting_keys:
        assert {len(line) for line in lines(findings, setting)} == {len(columns(findings))}


def test_columns_are_called_as_the_job_calls_things() -> None:
    assert columns(read(full()))[1:6] == ["images/s", "step ms", "s to 0.93", "final loss", "test accuracy"]
    assert columns(read(minimal()))[1:4] == ["tokens/s", "step ms", "s to target"]


def test_a_withheld_row_shows_no_speed_and_its_reason_stands_below() -> None:
    findings = read(full())
    (line,) = [line for line in lines(findings, GIGABIT_KEY) if line[0] == "hub-aggregate"]
    assert [cell for cell in line if cell == "withheld"] == ["withheld"] * 5
    assert notes(findings)[0] == (
        f"{GIGABIT_KEY} hub-aggregate: withheld, hub-aggregate differs from local by 0.031 in head.weight"
    )


def test_medians_come_with_half_their_interval_and_with_who_has_them() -> None:
    findings = read(full())
    (slow,) = [line for line in lines(findings, "n4 k1 200mbit") if line[0] == "hub-asp"]
    assert slow[3] == "24.55 ±2% (2/3)"


def test_numbers_of_some_seeds_only_say_so() -> None:
    shown = figures("images", "accuracy")["seconds_to_target"]
    assert shown.interval(Number.of([24.1, None, 25.0])) == "24.6 (24.1–25.0) (2/3)"
    assert shown.interval(Number.of([24.1, 25.0])) == "24.6 (24.1–25.0)"
    assert PART in html_tree(render(read(full()))).text
    assert "2 of 3 seeds have a value" not in render(read(minimal()))


def test_exchanges_stand_in_nccl_tests_columns_and_those_of_a_withheld_row_without_times() -> None:
    findings = read(full())
    ring, *_, withheld = exchanges(findings, GIGABIT_KEY)
    assert len(ring) == len(HEADS)
    assert ring == ["ring", "2,200,000", "550,000", "float", "avg", "26,500", "0.0830", "0.125", "0"]
    assert withheld == ["hub-aggregate", *ring[1:5], *["withheld"] * 3, "7"]
    assert exchanges(findings, EMULATED.key) == []


def test_what_was_not_measured_is_a_dash() -> None:
    findings = read(minimal())
    assert lines(findings, "n2 k1") == [["ring", "812", *["–"] * 9]]


def test_prices_are_shown_if_the_experiment_has_them() -> None:
    results = minimal()
    results["experiment"]["prices"] = {"worker": 4.0}
    results["rows"][0]["numbers"] |= {"price_to_target": summary([0.5])}
    findings = read(results)
    shown = dict(zip(columns(findings), *lines(findings, "n2 k1"), strict=True))
    assert shown["price/epoch"] == "–"
    assert [value for head, value in shown.items() if head.startswith("price to")] == ["0.5"]
    assert any("all hosts" in note for note in notes(findings))


def test_rows_that_slept_say_so() -> None:
    findings = read(full())
    assert all(line[0].endswith("(emulated)") for line in lines(findings, EMULATED.key))
    assert any(note.startswith("Emulated:") for note in notes(findings))


def test_notes_speak_of_nothing_that_did_not_run() -> None:
    said = notes(read(minimal()))
    assert said[0].startswith("One seed:")
    assert not any("Staleness" in note or "local" in note or "Emulated" in note for note in said)


def test_a_run_that_failed_is_told_below_the_table() -> None:
    results = minimal()
    results["rows"][0]["failed"] = "1 of 1 runs: it was killed"
    assert notes(read(results))[0] == "ring: failed, 1 of 1 runs: it was killed"


@pytest.mark.parametrize(("mean", "said"), [(2.8, "longer"), (2.2, None), (1.8, None), (1.6, "shorter")])
def test_a_mean_step_that_is_not_the_median_one_is_told_below_the_table(
    mean: float, said: str | None
) -> None:
    results = minimal()
    results["rows"][0]["numbers"] |= {
        "step_ms": summary([2.0]),
        "step_mean_ms": summary([mean]),
        "compute_ms": summary([mean - 1.0]),
        "exposed_ms": summary([1.0]),
    }
    told = [note for note in notes(read(results)) if "mean step takes" in note]
    page = render(read(results)).replace("\N{NO-BREAK SPACE}", " ")
    if said is None:
        assert told == []
        assert "mean step takes" not in page
        return
    (note,) = told
    assert note.startswith(f"The mean step takes {mean:.2f} ms (ring): ")
    assert f"some steps are much {said} than the median" in note
    assert note in page


def test_a_row_whose_speed_is_withheld_has_no_mean_step_either() -> None:
    results = minimal()
    results["rows"][0] |= {"withheld": "it differs"}
    results["rows"][0]["numbers"] |= {"step_ms": summary([2.0]), "step_mean_ms": summary([4.0])}
    assert not any("mean step takes" in note for note in notes(read(results)))


def test_the_greatest_staleness_is_that_of_all_seeds() -> None:
    results = minimal()
    late = {"staleness_mean": summary([0.5, 0.8, 0.9]), "staleness_max": summary([2.0, 4.0, 3.0])}
    results["rows"][0]["numbers"] |= late
    findings = read(results)
    ((*_, stale),) = lines(findings, "n2 k1")
    assert stale == "0.80/4"
    shown = figures("images", "accuracy")["staleness_max"]
    assert shown.interval(findings.rows[0].number("staleness_max")) == "4"


def test_the_screen_shows_settings_rows_and_verdict_on_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = full() | {
        "verdict": ["the hub [wins] by [/] far"],
        "answer": "On this machine the ring is faster.",
    }
    show(read(results), Path("results/mine/report.html"))
    said = capsys.readouterr()
    assert said.out == ""
    assert "4 workers, 1 server, links of 1 Gbit/s with 0.5 ms latency" in said.err
    assert "hub-asp (emulated)" in said.err
    assert "busbw (GB/s)" in said.err
    assert any(all(head in line for head in columns(read(results))) for line in said.err.splitlines())
    assert "* the hub [wins] by [/] far" in said.err
    assert "Report, to open in a browser: results/mine/report.html\n" in said.err
    assert said.err.endswith("On this machine the ring is faster.\n")

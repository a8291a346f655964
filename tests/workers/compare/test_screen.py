"""The terminal's table, made from the results alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from hubring.workers.compare.findings import Findings
from hubring.workers.compare.plan.setting import Setting
from hubring.workers.compare.show.figures import HEADS, exchanges
from hubring.workers.compare.show.page import page as render
from hubring.workers.compare.show.screen import notes, show, table
from hubring.workers.compare.statistics import figures
from tests.support.compare.results import EMULATED, GIGABIT, full, minimal, read, summary

GIGABIT_KEY = Setting(workers=4, link=GIGABIT).key


def heads(findings: Findings) -> list[str]:
    return table(findings, findings.setting_keys[0])[0]


def test_columns_are_called_as_the_job_calls_things() -> None:
    assert heads(read(full()))[1:6] == ["images/s", "step ms", "s to 0.93", "final loss", "test accuracy"]
    assert heads(read(minimal()))[1:4] == ["tokens/s", "step ms", "s to target"]
    of_loss = minimal()
    of_loss["job"] |= {"metric": "loss", "title": "loss"}
    assert [head for head in heads(read(of_loss)) if "loss" in head] == ["loss"]


def test_a_withheld_row_shows_no_speed() -> None:
    findings = read(full())
    (line,) = [line for line in table(findings, GIGABIT_KEY)[1] if line[0] == "hub-aggregate"]
    assert [cell for cell in line if cell == "withheld"] == ["withheld"] * 5


def test_medians_come_with_half_their_interval_and_with_who_has_them() -> None:
    findings = read(full())
    (slow,) = [line for line in table(findings, "n4 k1 200mbit")[1] if line[0] == "hub-asp"]
    assert slow[3] == "24.55 ±2% (2/3)"


def test_exchanges_stand_in_nccl_tests_columns_and_those_of_a_withheld_row_without_times() -> None:
    findings = read(full())
    ring, *_, withheld = exchanges(findings, GIGABIT_KEY)
    assert len(ring) == len(HEADS)
    assert ring == ["ring", "2,200,000", "550,000", "float", "avg", "26,500", "0.0830", "0.125", "0"]
    assert withheld == ["hub-aggregate", *ring[1:5], *["withheld"] * 3, "7"]
    assert exchanges(findings, EMULATED.key) == []


def test_an_unmeasured_number_is_a_dash() -> None:
    findings = read(minimal())
    assert table(findings, "n2 k1")[1] == [["ring", "812", *["–"] * 9]]


def test_prices_are_shown_if_the_experiment_has_them() -> None:
    results = minimal()
    results["experiment"]["prices"] = {"worker": 4.0}
    results["rows"][0]["numbers"] |= {"price_to_target": summary([0.5])}
    findings = read(results)
    shown = dict(zip(heads(findings), *table(findings, "n2 k1")[1], strict=True))
    assert shown["price/epoch"] == "–"
    assert [value for head, value in shown.items() if head.startswith("price to")] == ["0.5"]
    assert any("all hosts" in note for note in notes(findings))


def test_notes_speak_of_nothing_that_did_not_run() -> None:
    said = notes(read(minimal()))
    assert said[0].startswith("One seed:")
    assert not any("Staleness" in note or "local" in note or "Emulated" in note for note in said)


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


def test_the_greatest_staleness_is_that_of_all_seeds() -> None:
    results = minimal()
    late = {"staleness_mean": summary([0.5, 0.8, 0.9]), "staleness_max": summary([2.0, 4.0, 3.0])}
    results["rows"][0]["numbers"] |= late
    findings = read(results)
    ((*_, stale),) = table(findings, "n2 k1")[1]
    assert stale == "0.80/4"
    shown = figures("images", "accuracy")["staleness_max"]
    assert shown.interval(findings.rows[0].number("staleness_max")) == "4"


def test_the_screen_shows_settings_rows_and_verdict_on_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = full() | {
        "verdict": ["the hub [wins] by [/] far", *full()["verdict"]],
        "answer": "On this machine the ring is faster.",
    }
    show(read(results), Path("results/mine/report.html"))
    said = capsys.readouterr()
    assert said.out == ""
    assert "4 workers, 1 server, links of 1 Gbit/s, 0.5 ms of latency" in said.err
    assert all(line[0].endswith("(emulated)") for line in table(read(results), EMULATED.key)[1])
    assert "hub-asp (emulated)" in said.err
    assert "Emulated: workers slept for part of every step" in said.err
    assert "busbw (GB/s)" in said.err
    assert any(all(head in line for head in heads(read(results))) for line in said.err.splitlines())
    assert "* the hub [wins] by [/] far" in said.err
    assert "* No speed is shown for hub-aggregate: it differs from local by 0.031" in said.err
    answer, trust, report = said.err.splitlines()[-3:]
    assert answer == "On this machine the ring is faster."
    assert trust.startswith("Can you trust this? Not yet. ")
    assert report == "Report, to open in a browser: results/mine/report.html"

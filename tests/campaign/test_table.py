"""The report counts runs and violations, and repeats each with one command."""

from __future__ import annotations

from tests.campaign.planted import scenario
from tests.campaign.table import Result, report


def test_the_report_counts_by_fault_and_mode_and_names_the_command() -> None:
    good = Result(scenario("bsp"), {}, 2.0)
    bad = Result(scenario("asp", "corrupt"), {"I2": ["checkpoint: twice"], "I8": ["no"]}, 3.0)
    text = report([good, good, bad], 7.0)
    assert "3 runs in 7 s, the longest 3.0 s; 1 with a violation" in text
    assert "| cut, data | 2 |  |  |  |  |" in text
    assert "| corrupt, data |  |  | 1 / 1 |  |  |" in text
    assert "| all | 2 |  | 1 / 1 |  |  |" in text
    assert "| I2 | 1 | 7 |" in text
    assert "`make campaign RUNS=1 SEED=7`" in text
    assert "I2: checkpoint: twice" in text


def test_a_report_without_violations_lists_none() -> None:
    assert "violated" not in report([Result(scenario(), {}, 1.0)], 1.0)

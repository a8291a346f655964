"""What a person sees of the doctor's findings."""

from __future__ import annotations

import pytest

from hubring.ps.doctor import screen
from hubring.ps.doctor.finding import failure, ok, skipped, warning


def test_lines_show_each_fix_below_its_finding() -> None:
    findings = [
        ok("torch", "2.13"),
        failure("checkpoint dir", "[full]", "make room"),
        skipped("NCCL", "no GPU"),
    ]
    assert screen.lines(findings) == [
        "ok       torch           2.13",
        "failure  checkpoint dir  [full]",
        "                         fix: make room",
        "skipped  NCCL            no GPU",
    ]
    assert screen.summary(findings) == "1 failure, 0 warnings; 1 ok, 1 skipped"


def test_without_a_terminal_a_finding_is_a_line_however_long(capsys: pytest.CaptureFixture[str]) -> None:
    screen.show([warning("a", "b" * 300, "c" * 300)])
    told = capsys.readouterr()
    assert told.out == ""
    assert [len(line) for line in told.err.splitlines()[:2]] == [7 + 2 + 1 + 2 + 300, 7 + 2 + 1 + 2 + 5 + 300]


def test_on_a_terminal_there_is_a_table_that_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    screen.show([failure("disk", "[full] " + "word " * 40, "make room"), ok("torch", "2.13")])
    told = capsys.readouterr().err
    assert "[full]" in told
    assert "make room" in told
    assert "\x1b[" in told

"""What a finding must have, what all findings come to, and what a person sees of them."""

from __future__ import annotations

import pytest

from hubring.ps.doctor.check import (
    Finding,
    failure,
    finding_lines,
    findings_result,
    findings_summary,
    ok,
    show_findings,
    skipped,
    warning,
)


def test_a_failure_without_a_fix_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="warnings and failures need a fix"):
        failure("disk", "it is full", "")
    with pytest.raises(AssertionError, match="other findings must not have one"):
        Finding("disk", "ok", "40 GiB", fix="buy more")


@pytest.mark.parametrize(
    ("findings", "code"),
    [
        ([], 0),
        ([ok("a", "well"), skipped("b", "absent"), warning("c", "slow", "wait")], 0),
        ([warning("c", "slow", "wait"), failure("server", "none", "start one", 69)], 69),
        ([failure("server", "none", "start one", 69), failure("disk", "full", "make room")], 78),
    ],
)
def test_a_missing_server_may_come_and_a_failing_machine_stays(findings: list[Finding], code: int) -> None:
    told = findings_result("hub1:5555", findings)
    assert told["exit_code"] == code
    assert told["failures"] == sum(finding.state == "failure" for finding in findings)
    assert told["warnings"] == sum(finding.state == "warning" for finding in findings)
    assert [set(each) for each in told["findings"]] == [{"name", "state", "found", "fix"}] * len(findings)


def test_lines_show_each_fix_below_its_finding() -> None:
    findings = [
        ok("torch", "2.13"),
        failure("checkpoint dir", "[full]", "make room"),
        skipped("NCCL", "no GPU"),
    ]
    assert finding_lines(findings) == [
        "ok       torch           2.13",
        "failure  checkpoint dir  [full]",
        "                         fix: make room",
        "skipped  NCCL            no GPU",
    ]
    assert findings_summary(findings) == "1 failure, 0 warnings; 1 ok, 1 skipped"


def test_on_a_terminal_there_is_a_table_that_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    show_findings([failure("disk", "[full] " + "word " * 40, "make room"), ok("torch", "2.13")])
    told = capsys.readouterr().err
    assert "[full]" in told
    assert "make room" in told
    assert "\x1b[" in told

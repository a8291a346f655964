"""What a finding must have, and what all findings come to."""

from __future__ import annotations

import pytest

from hubring.ps.doctor.finding import GIB, MIB, Finding, failure, format_bytes, ok, result, skipped, warning


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
    told = result("hub1:5555", findings)
    assert told["exit_code"] == code
    assert told["failures"] == sum(finding.state == "failure" for finding in findings)
    assert told["warnings"] == sum(finding.state == "warning" for finding in findings)
    assert [set(each) for each in told["findings"]] == [{"name", "state", "found", "fix"}] * len(findings)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (64 * MIB, "64 MiB"),
        (1.5 * GIB, "1.5 GiB"),
        (1000 * MIB, "1000 MiB"),
    ],
)
def test_bytes_are_spelt_in_the_largest_unit(nbytes: float, text: str) -> None:
    assert format_bytes(nbytes) == text

"""What a judgement of the doctor is expected to be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pytest

from hubring.ps.doctor.check import Finding, FindingState


class Case(NamedTuple):
    """A finding, how bad it is, and words of what it says and of how to fix it."""

    finding: Finding
    state: FindingState
    found: str
    fix: str = ""

    def check(self) -> None:
        assert self.finding.state == self.state, self.finding
        assert self.found in self.finding.found
        assert self.fix in self.finding.fix


def fine(finding: Finding, found: str) -> Case:
    return Case(finding, "ok", found)


def omits(finding: Finding, found: str) -> Case:
    return Case(finding, "skipped", found)


def warns(finding: Finding, found: str, fix: str) -> Case:
    return Case(finding, "warning", found, fix)


def fails(finding: Finding, found: str, fix: str) -> Case:
    return Case(finding, "failure", found, fix)


def judgements(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """Runs a test with each case."""
    names = [f"{case.finding.name}: {case.found}" for case in cases]
    return pytest.mark.parametrize("case", cases, ids=names)


def only(findings: Iterable[Finding]) -> Finding:
    [finding] = findings
    return finding

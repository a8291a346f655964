"""What one run of a row left behind."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]
"""One report of a job: `step`, `seconds` since training began, and its metrics."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run.

    Attributes:
        records: Every worker's reports in order, by rank.
        results: Every worker's last line, by rank.
        parameters: File with the final parameters.
        commands: What was started, ready to be pasted.
    """

    records: Sequence[Sequence[Line]]
    results: Sequence[Mapping[str, Any]]
    parameters: Path
    commands: Sequence[str]


def read_record(path: Path) -> list[Line]:
    """All reports in a record file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def latest(path: Path) -> Line | None:
    """The newest whole report in a file that is still written; None before the first."""
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    line: Line | None = json.loads(whole[whole.rfind("\n") + 1 :]) if whole else None
    return line

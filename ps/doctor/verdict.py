"""What all findings come to: the last line and the exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from hubring.ps.core.errors import ConfigError
from hubring.ps.doctor.finding import Finding


def exit_code(findings: Sequence[Finding]) -> int:
    """0 if nothing failed; 69 if only the server is missing, which may come; 78 if this machine fails.

    So a script that waits for a server may go on asking after 69, and after 78 need not.
    """
    codes = {finding.exit_code for finding in findings if finding.state == "failure"}
    return ConfigError.exit_code if ConfigError.exit_code in codes else max(codes, default=0)


def result(server: str | None, findings: Sequence[Finding]) -> dict[str, Any]:
    """The last line's object."""
    keys = ("name", "state", "found", "mend")
    counts = Counter(finding.state for finding in findings)
    return {
        "server": server,
        "findings": [{key: msgspec.to_builtins(finding)[key] for key in keys} for finding in findings],
        "failures": counts["failure"],
        "warnings": counts["warning"],
        "exit_code": exit_code(findings),
    }

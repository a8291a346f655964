"""The result of a check: its severity, what it found and how to fix it; and the result of all checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from hubring.ps.core.errors import ConfigError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

State = Literal["ok", "warning", "failure", "skipped"]


class Finding(msgspec.Struct, frozen=True):
    """One result. A check can have several.

    Attributes:
        name: What the check examined.
        state: `warning`: some jobs run slower, or some do not run. `failure`: jobs cannot run. `skipped`:
            not examined.
        found: What the check found; for `skipped`, the reason.
        fix: A command or a setting that fixes the problem. Every warning and failure has one; no other state
            has.
        exit_code: The program's exit code if this is a failure.
    """

    name: str
    state: State
    found: str
    fix: str = ""
    exit_code: int = 0

    def __post_init__(self) -> None:
        assert bool(self.fix) == (self.state in ("warning", "failure")), (
            f"warnings and failures need a fix, other findings must not have one: {self}"
        )


def ok(name: str, found: str) -> Finding:
    """Makes a finding without a problem."""
    return Finding(name, "ok", found)


def warning(name: str, found: str, fix: str) -> Finding:
    """Makes a finding with which some jobs run slower, or some do not run."""
    return Finding(name, "warning", found, fix)


def failure(name: str, found: str, fix: str, exit_code: int = ConfigError.exit_code) -> Finding:
    """Makes a finding with which jobs cannot run."""
    return Finding(name, "failure", found, fix, exit_code)


def skipped(name: str, why: str) -> Finding:
    """Makes a finding for something that was not examined."""
    return Finding(name, "skipped", why)


def exit_code(findings: Sequence[Finding]) -> int:
    """Returns 0 if no check failed, 69 if only the server cannot be reached, 78 if this machine fails.

    A script that waits for a server can retry after 69; after 78 a retry does not help.
    """
    codes = {finding.exit_code for finding in findings if finding.state == "failure"}
    return ConfigError.exit_code if ConfigError.exit_code in codes else max(codes, default=0)


def result(server: str | None, findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns the JSON object for the last line of stdout."""
    counts = Counter(finding.state for finding in findings)
    shown: list[dict[str, Any]] = msgspec.to_builtins(findings)
    for finding in shown:
        del finding["exit_code"]
    return {
        "server": server,
        "findings": shown,
        "failures": counts["failure"],
        "warnings": counts["warning"],
        "exit_code": exit_code(findings),
    }


def format_bytes(nbytes: float) -> str:
    """Formats a number of bytes with three digits, in the largest unit that does not exceed it."""
    for size, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= size:
            count = nbytes / size
            return f"{count:.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"
    return f"{nbytes:.0f} bytes"

"""What a check found: how bad it is, in a sentence, and how to fix it; and what all findings come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from hubring.ps.core.errors import ConfigError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

State = Literal["ok", "warning", "failure", "skipped"]


class Finding(msgspec.Struct, frozen=True):
    """One thing that was examined, or not.

    Attributes:
        name: What was examined; a check may examine several things.
        state: `warning`: jobs run, but worse than they could, or not all of them. `failure`: jobs cannot
            run. `skipped`: it was not examined.
        found: What is there; if it was skipped, why.
        mend: A command or a setting that fixes it; empty where there is nothing to fix.
        exit_code: The program's, if this failed.
    """

    name: str
    state: State
    found: str
    mend: str = ""
    exit_code: int = 0

    def __post_init__(self) -> None:
        assert bool(self.mend) == (self.state in ("warning", "failure")), (
            f"a mend is due, or too much: {self}"
        )


def ok(name: str, found: str) -> Finding:
    """There is nothing to fix."""
    return Finding(name, "ok", found)


def warning(name: str, found: str, mend: str) -> Finding:
    """Jobs run, but worse than they could, or not all of them."""
    return Finding(name, "warning", found, mend)


def failure(name: str, found: str, mend: str, exit_code: int = ConfigError.exit_code) -> Finding:
    """Jobs cannot run."""
    return Finding(name, "failure", found, mend, exit_code)


def skipped(name: str, why: str) -> Finding:
    """It was not examined."""
    return Finding(name, "skipped", why)


def exit_code(findings: Sequence[Finding]) -> int:
    """0 if nothing failed; 69 if only the server is missing; 78 if this machine fails.

    So a script that waits for a server can try again after 69, and need not after 78.
    """
    codes = {finding.exit_code for finding in findings if finding.state == "failure"}
    return ConfigError.exit_code if ConfigError.exit_code in codes else max(codes, default=0)


def result(server: str | None, findings: Sequence[Finding]) -> dict[str, Any]:
    """The JSON object that the program prints last."""
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


def spelt(nbytes: float) -> str:
    """Bytes to three digits, in the largest unit of which there is one."""
    for size, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= size:
            count = nbytes / size
            return f"{count:.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"
    return f"{nbytes:.0f} bytes"

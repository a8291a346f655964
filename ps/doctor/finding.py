"""What a check found: how bad it is, in a sentence, and the mend."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from hubring.ps.core.errors import ConfigError

State = Literal["ok", "warning", "failure", "skipped"]


class Finding(Struct, frozen=True):
    """One thing that was looked at, or not.

    Attributes:
        name: Of the thing; a check may find out about several.
        state: `warning`: jobs run, but worse than they could, or not all of them. `failure`: what stands
            there cannot work. `skipped`: it was not looked at.
        found: What is there; if it was skipped, why.
        mend: A command or a setting; empty where there is nothing to mend.
        exit_code: What the program ends with if this failed.
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
    """Nothing to mend."""
    return Finding(name, "ok", found)


def warning(name: str, found: str, mend: str) -> Finding:
    """Jobs run, but worse than they could, or not all of them."""
    return Finding(name, "warning", found, mend)


def failure(name: str, found: str, mend: str, exit_code: int = ConfigError.exit_code) -> Finding:
    """What stands there cannot work."""
    return Finding(name, "failure", found, mend, exit_code)


def skipped(name: str, why: str) -> Finding:
    """It was not looked at."""
    return Finding(name, "skipped", why)

"""A check, its subject, its findings, and all findings together: on the screen, as JSON, as an exit code.

On a terminal they are a table on standard error, otherwise one line each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hubring.ps.config.server import ServerConfig
from hubring.ps.config.sources import load_server
from hubring.ps.config.values import address, is_loopback
from hubring.ps.core.errors import ConfigError
from hubring.ps.transport.host import towards

LOOPBACK = "127.0.0.1"
KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

FindingState = Literal["ok", "warning", "failure", "skipped"]


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
    state: FindingState
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


class DoctorCheck(NamedTuple):
    """Examines one part of the machine.

    Attributes:
        name: The name of the first finding.
        examine: Yields findings one by one, so that a later crash loses none.
        fix: What to do if the check crashes or hangs.
        further: The names of later findings. Those that the check does not reach are reported as skipped.
    """

    name: str
    examine: Callable[[], Iterable[Finding]]
    fix: str
    further: tuple[str, ...] = ()


class Subject(NamedTuple):
    """This machine and the settings of a server on it.

    Attributes:
        config: The server settings that `ps-server start` would use.
        config_file: The TOML file from `--config`, if any.
        server: `HOST:PORT` of a running server to check, if any.
        variables: The environment.
        seconds: Time limit of the checks.
    """

    config: ServerConfig
    config_file: Path | None
    server: str | None
    variables: Mapping[str, str]
    seconds: float

    @property
    def server_host(self) -> str:
        """The server's host; loopback if there is no server."""
        return address(self.server)[0] if self.server else LOOPBACK

    @property
    def ring_address(self) -> str:
        """This machine's address for the other members of a ring.

        Raises:
            ConfigError: No route leads to the server.
        """
        host = self.server_host
        return host if is_loopback(host) else towards(host)


def settled(
    flags: Mapping[str, object], config_file: Path | None, variables: Mapping[str, str]
) -> ServerConfig:
    """Returns the server's settings; from the flags alone if the file or the environment is wrong.

    The settings check reports such an error.

    Raises:
        ConfigError: A flag is wrong.
    """
    try:
        return load_server(flags, config_file, variables)
    except ConfigError:
        return load_server(flags, None, {})


def format_bytes(nbytes: float) -> str:
    """Formats a number of bytes with three digits, in the largest unit that does not exceed it."""
    for size, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= size:
            count = nbytes / size
            return f"{count:.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


FINDING_STYLES = {"ok": "green", "warning": "yellow", "failure": "bold red", "skipped": "dim"}


def exit_code(findings: Sequence[Finding]) -> int:
    """Returns 0 if no check failed, 69 if only the server cannot be reached, 78 if this machine fails.

    A script that waits for a server can retry after 69; after 78 a retry does not help.
    """
    codes = {finding.exit_code for finding in findings if finding.state == "failure"}
    return ConfigError.exit_code if ConfigError.exit_code in codes else max(codes, default=0)


def findings_result(server: str | None, findings: Sequence[Finding]) -> dict[str, Any]:
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


def announce_checks(server: str | None, seconds: float) -> None:
    """Prints what the doctor checks and how long it can take, before the checks run."""
    connection = f" and the connection to {server}" if server else ""
    line = f"checking this machine{connection}; at most {seconds:g} s"
    _console().print(line, markup=False, soft_wrap=True)


def show_findings(findings: Sequence[Finding]) -> None:
    """Prints the findings and the number of each state."""
    console = _console()
    if console.is_terminal:
        console.print(_table(findings))
    else:
        for line in finding_lines(findings):
            console.print(line, markup=False, soft_wrap=True)
    console.print(findings_summary(findings), markup=False)


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Returns a line for each finding, followed by a line for its fix."""
    width = max(len(finding.name) for finding in findings)
    shown = []
    for finding in findings:
        shown.append(f"{finding.state:<7}  {finding.name:<{width}}  {finding.found}")
        if finding.fix:
            shown.append(f"{'':<7}  {'':<{width}}  fix: {finding.fix}")
    return shown


def findings_summary(findings: Sequence[Finding]) -> str:
    """Returns the number of findings of each state, worst first."""
    counts = Counter(finding.state for finding in findings)
    failures, warnings = counts["failure"], counts["warning"]
    return (
        f"{failures} failure{'s' * (failures != 1)}, {warnings} warning{'s' * (warnings != 1)};"
        f" {counts['ok']} ok, {counts['skipped']} skipped"
    )


def _console() -> Console:
    return Console(stderr=True, highlight=False)


def _table(findings: Sequence[Finding]) -> Table:
    table = Table("", "what", "found", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for finding in findings:
        style = FINDING_STYLES[finding.state]
        fix = f"\n[bold]fix:[/] {escape(finding.fix)}" if finding.fix else ""
        table.add_row(f"[{style}]{finding.state}[/]", escape(finding.name), escape(finding.found) + fix)
    return table

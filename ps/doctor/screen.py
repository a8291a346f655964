"""The doctor's output on standard error: a table on a terminal, otherwise one line per finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hubring.ps.doctor.finding import Finding

STYLES = {"ok": "green", "warning": "yellow", "failure": "bold red", "skipped": "dim"}


def announce(server: str | None, seconds: float) -> None:
    """Prints what the doctor checks and how long it can take, before the checks run."""
    connection = f" and the connection to {server}" if server else ""
    Console(stderr=True, highlight=False).print(
        f"checking this machine{connection}; at most {seconds:g} s", markup=False, soft_wrap=True
    )


def show(findings: Sequence[Finding]) -> None:
    """Prints the findings and the number of each state."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        console.print(_table(findings))
    else:
        for line in lines(findings):
            console.print(line, markup=False, soft_wrap=True)
    console.print(summary(findings), markup=False)


def lines(findings: Sequence[Finding]) -> list[str]:
    """Returns a line for each finding, followed by a line for its fix."""
    width = max(len(finding.name) for finding in findings)
    shown = []
    for finding in findings:
        shown.append(f"{finding.state:<7}  {finding.name:<{width}}  {finding.found}")
        if finding.fix:
            shown.append(f"{'':<7}  {'':<{width}}  fix: {finding.fix}")
    return shown


def summary(findings: Sequence[Finding]) -> str:
    """Returns the number of findings of each state, worst first."""
    counts = Counter(finding.state for finding in findings)
    failures, warnings = counts["failure"], counts["warning"]
    return (
        f"{failures} failure{'s' * (failures != 1)}, {warnings} warning{'s' * (warnings != 1)};"
        f" {counts['ok']} ok, {counts['skipped']} skipped"
    )


def _table(findings: Sequence[Finding]) -> Table:
    table = Table("", "what", "found", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for finding in findings:
        style = STYLES[finding.state]
        fix = f"\n[bold]fix:[/] {escape(finding.fix)}" if finding.fix else ""
        table.add_row(f"[{style}]{finding.state}[/]", escape(finding.name), escape(finding.found) + fix)
    return table

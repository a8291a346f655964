"""What a person sees on standard error: a table on a terminal, else one line for each finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hubring.ps.doctor.finding import Finding

STYLES = {"ok": "green", "warning": "yellow", "failure": "bold red", "skipped": "dim"}


def announce(server: str | None, seconds: float) -> None:
    """Prints what is examined, before there is anything to show."""
    way = f" and the way to {server}" if server else ""
    Console(stderr=True, highlight=False).print(
        f"looking at this machine{way}; at most {seconds:g} s", markup=False, soft_wrap=True
    )


def show(findings: Sequence[Finding]) -> None:
    """Prints the findings, and how many there are of each kind."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        console.print(_table(findings))
    else:
        for line in lines(findings):
            console.print(line, markup=False, soft_wrap=True)
    console.print(summary(findings), markup=False)


def lines(findings: Sequence[Finding]) -> list[str]:
    """A line for each finding, and below it a line for its fix."""
    width = max(len(finding.name) for finding in findings)
    shown = []
    for finding in findings:
        shown.append(f"{finding.state:<7}  {finding.name:<{width}}  {finding.found}")
        if finding.mend:
            shown.append(f"{'':<7}  {'':<{width}}  mend: {finding.mend}")
    return shown


def summary(findings: Sequence[Finding]) -> str:
    """How many there are of each kind, the worst first."""
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
        mend = f"\n[bold]mend:[/] {escape(finding.mend)}" if finding.mend else ""
        table.add_row(f"[{style}]{finding.state}[/]", escape(finding.name), escape(finding.found) + mend)
    return table

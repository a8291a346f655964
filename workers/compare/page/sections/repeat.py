"""What it takes to run the same again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hubring.ps.markup import Html, element, together, verbatim
from hubring.workers.compare.page import toml
from hubring.workers.compare.page.chart import Column, table
from hubring.workers.compare.page.material import Material, section


def repeat(material: Material) -> Html:
    """Command, experiment, machine, versions, seeds, and the programs that each run consisted of."""
    findings = material.findings
    seeds = sorted({seed for each in findings.rows for seed in each.seeds})
    told = f"Seeds {', '.join(map(str, seeds))}. " if seeds else ""
    lead = f"{told}Save the experiment as a file and give it to ps-compare run, or paste the command."
    return section(
        "repeat",
        "Run it again",
        lead,
        _listing("The command", findings.command),
        _listing("The experiment, as TOML", toml.dumps(findings.experiment)),
        _machine(findings.machine),
        _programs(findings.commands),
    )


def _listing(title: str, text: str) -> Html:
    code = element("pre", element("code", verbatim(text)), tabindex=0, role="region", aria_label=title)
    return together(element("h3", title), code)


def _machine(machine: Mapping[str, Any]) -> Html | None:
    lines = [[name, str(value)] for name, value in _flat(machine).items()]
    told = table("The machine and the versions", (Column("what"), Column("value", words=True)), lines)
    return together(element("h3", "The machine"), told) if lines else None


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested names joined by spaces."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= (
            _flat(value, f"{before}{name} ") if isinstance(value, Mapping) else {f"{before}{name}": value}
        )
    return found


def _programs(commands: Mapping[str, list[str]]) -> Html | None:
    if not commands:
        return None
    text = "\n\n".join("\n".join((f"# {run}", *lines)) for run, lines in commands.items())
    return element(
        "details", element("summary", "The programs that each run consisted of"), _listing("Programs", text)
    )

"""Everything that is needed to run the experiment again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hubring.workers.compare.experiment import toml
from hubring.workers.compare.page.figure import Table
from hubring.workers.compare.page.material import Material
from hubring.workers.compare.result.clock import sentence
from hubring.workers.compare.result.setting_text import legend


def repeat(material: Material) -> dict[str, Any]:
    """Returns command, experiment, machine, versions, seeds, and the programs of each run."""
    findings = material.findings
    lines = [[name, str(value)] for name, value in _flat(findings.machine).items()]
    programs = ("\n".join((f"# {run}", *lines)) for run, lines in findings.commands.items())
    return {
        "title": "Run the experiment again",
        "seeds": sorted({seed for each in findings.rows for seed in each.seeds}),
        "command": findings.command,
        "experiment": toml.dumps(findings.experiment),
        "machine": Table("Machine and versions", ("property", "value"), lines, words=("value",)),
        "clocks": sentence(findings.clocks),
        "programs": "\n\n".join(programs),
        "settings": legend(findings.settings),
    }


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Joins nested names with spaces."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= (
            _flat(value, f"{before}{name} ") if isinstance(value, Mapping) else {f"{before}{name}": value}
        )
    return found

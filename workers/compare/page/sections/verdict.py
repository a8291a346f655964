"""The line below the verdict."""

from __future__ import annotations

from hubring.workers.compare.page.material import Material
from hubring.workers.compare.result.setting_text import words


def byline(material: Material) -> str:
    """Returns what was run, in one line."""
    findings = material.findings
    seeds = "one seed" if findings.seeds == 1 else f"{findings.seeds} seeds"
    rows, settings = len(findings.row_names), findings.setting_keys
    where = (
        words(findings.setting(settings[0]), settings[0])
        if len(settings) == 1
        else f"{len(settings)} settings"
    )
    parts = [material.goal.job, f"{rows} way{'s' if rows != 1 else ''} to train", where, seeds]
    return " · ".join(parts)

"""Every number of every row, for whoever looks for one that is drawn nowhere."""

from __future__ import annotations

from typing import Any

from hubring.workers.compare.page.figure import Label, Table
from hubring.workers.compare.page.material import Material
from hubring.workers.compare.result.setting_text import words
from hubring.workers.compare.result.statistics import interval_words


def numbers(material: Material) -> dict[str, Any] | None:
    """One wide table, and what the names in it mean; a column that nobody has is left out."""
    findings, figures = material.findings, material.figures
    there = [name for name in figures if any(each.number(name) is not None for each in findings.rows)]
    if not there:
        return None
    heads = ["row", "setting", *(figures[each].head for each in there)]
    lines: list[list[str | Label]] = []
    for each in findings.rows:
        told = [figures[name].interval(each.number(name)) for name in there]
        lines.append([material.label(each), each.setting, *told])
    rows = {each.row: each.about for each in findings.rows if each.about}
    settings = {key: words(findings.setting(key), key) for key in findings.setting_keys}
    return {
        "title": "Every number",
        "interval": interval_words(findings.seeds),
        "meanings": [terms for terms in (rows, settings) if terms],
        "table": Table("Every number: median over seeds, and its interval", heads, lines, ("setting",)),
    }

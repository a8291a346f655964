"""All numbers of every row."""

from __future__ import annotations

from typing import Any

from hubring.workers.compare.figures import partial
from hubring.workers.compare.page.figure import Label, Table
from hubring.workers.compare.page.material import Material
from hubring.workers.compare.result.setting_text import words
from hubring.workers.compare.result.statistics import interval_words


def numbers(material: Material) -> dict[str, Any] | None:
    """Returns one wide table and the meaning of its names, without columns that have no value."""
    findings, figures = material.findings, material.figures
    shown = [name for name in figures if any(each.number(name) is not None for each in findings.rows)]
    if not shown:
        return None
    heads = ["row", "setting", *(figures[each].head for each in shown)]
    lines: list[list[str | Label]] = []
    for each in findings.rows:
        cells = [figures[name].interval(each.number(name)) for name in shown]
        lines.append([material.label(each), each.setting, *cells])
    rows = {each.row: each.about for each in findings.rows if each.about}
    settings = {key: words(findings.setting(key), key) for key in findings.setting_keys}
    return {
        "title": "All numbers",
        "interval": interval_words(findings.seeds),
        "partial": partial(each.number(name) for each in findings.rows for name in shown),
        "meanings": [terms for terms in (rows, settings) if terms],
        "table": Table("All numbers: median over seeds, and its interval", heads, lines, ("setting",)),
    }

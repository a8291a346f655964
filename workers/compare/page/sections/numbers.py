"""Every number of every row, for whoever looks for one that is drawn nowhere."""

from __future__ import annotations

from collections.abc import Mapping

from hubring.ps.markup import Html, element
from hubring.workers.compare.circumstance import words
from hubring.workers.compare.page.chart import Column, table
from hubring.workers.compare.page.material import Material, section
from hubring.workers.compare.statistics import interval_words


def numbers(material: Material) -> Html | None:
    """One wide table; a column that nobody has is left out."""
    rows = material.findings.rows
    there = [name for name in material.figures if any(each.number(name) is not None for each in rows)]
    if not there:
        return None
    heads = [
        Column("row"),
        Column("setting", words=True),
        *(Column(material.figures[each].head) for each in there),
    ]
    lines = [
        [
            material.label(each),
            each.setting,
            *(material.figures[name].interval(each.number(name)) for name in there),
        ]
        for each in rows
    ]
    told = table("Every number: median over seeds, and its interval", heads, lines)
    lead = (
        "Medians over seeds with their intervals. Each"
        f" {interval_words(material.findings.seeds)}. A dash stands where nothing was measured."
    )
    shown = element("details", element("summary", "Numbers: every row, all that was measured"), told)
    return section("numbers", "Every number", lead, *_names(material), shown)


def _names(material: Material) -> list[Html]:
    """What rows and settings are called, and what that means."""
    findings = material.findings
    rows = {each.row: each.about for each in findings.rows if each.about}
    settings = {key: words(findings.setting(key), key) for key in findings.setting_keys}
    return [_list(terms) for terms in (rows, settings) if terms]


def _list(terms: Mapping[str, str]) -> Html:
    told = (element("div", element("dt", term), element("dd", meaning)) for term, meaning in terms.items())
    return element("dl", *told)

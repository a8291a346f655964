"""Every number of every row, for whoever looks for one that is drawn nowhere."""

from __future__ import annotations

from workers.compare.page.chart import Column, table
from workers.compare.page.element import Html, element
from workers.compare.page.material import Material, section


def numbers(material: Material) -> Html | None:
    """One wide table; a column that nobody has is left out."""
    rows = material.findings.rows
    there = [name for name in material.figures if any(each.number(name) is not None for each in rows)]
    if not there:
        return None
    heads = [Column("row"), Column("setting", words=True), *(Column(material.figures[each].head) for each in there)]
    lines = [
        [material.label(each), each.setting, *(material.figures[name].interval(each.number(name)) for name in there)]
        for each in rows
    ]
    told = table("Every number: median over seeds, and its 95 % confidence interval", heads, lines)
    lead = "Medians over seeds with their 95 % confidence intervals; a dash stands where nothing was measured."
    shown = element("details", element("summary", f"Numbers: {len(rows)} rows, {len(there)} columns"), told)
    return section("numbers", "Every number", lead, _abouts(material), shown)


def _abouts(material: Material) -> Html | None:
    abouts = {each.row: each.about for each in material.findings.rows if each.about}
    terms = (element("div", element("dt", row), element("dd", about)) for row, about in abouts.items())
    return element("dl", *terms) if abouts else None

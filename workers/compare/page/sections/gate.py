"""The gate: whether the rows that ought to compute the same did."""

from __future__ import annotations

from collections.abc import Iterable

from hubring.ps.markup import Html, element, together
from hubring.workers.compare.findings import Gate, Pair
from hubring.workers.compare.page.chart import Column, table
from hubring.workers.compare.page.material import Material, section

COLUMNS = (
    Column("row"),
    Column("held against", words=True),
    Column("setting", words=True),
    Column("seed"),
    Column("differs by"),
    Column("allowed"),
    Column("in", words=True),
    Column("result", words=True),
)


def gate(material: Material) -> Html:
    """Yes or no, what that means, and every pair."""
    judged = material.findings.gate
    shut = [each for each in material.findings.rows if each.withheld is not None]
    reasons = [element("li", element("b", each.row), f", {each.setting}: {each.withheld}") for each in shut]
    withheld = together(element("p", "No speed is shown of:"), element("ul", *reasons)) if reasons else None
    return section("gate", "Did they compute the same?", _answer(judged), withheld, _pairs(judged))


def _answer(judged: Gate) -> Html:
    if not judged.pairs:
        return together("No two synchronous rows ran without a loss, so there was nothing to compare.")
    count, agree = len(judged.pairs), sum(pair.passed for pair in judged.pairs)
    word = element("strong", "Yes." if judged.passed else "No.", class_="yes" if judged.passed else "no")
    return together(
        word,
        f" {agree} of {count} pairs agree. Synchronous rows apply the same mean gradient and differ only in"
        " the order of additions, so their parameters may be apart by rounding alone. They are compared after"
        " the first steps, before training amplifies that: max |a − b| / max |a| of each tensor may then be"
        f" {judged.tolerance:g}. A second run of the hub must end in the same bits. A row that is apart by"
        " more is shown without its speed.",
    )


def _pairs(judged: Gate) -> Html | None:
    if not judged.pairs:
        return None
    told = table("Every pair of runs that was held against each other", COLUMNS, _lines(judged.pairs))
    return element("details", element("summary", "Numbers: every pair"), told, open=not judged.passed)


def _lines(pairs: Iterable[Pair]) -> Iterable[list[str | Html]]:
    for pair in sorted(pairs, key=lambda each: each.passed):
        word = element("span", "agrees" if pair.passed else "differs", class_="yes" if pair.passed else "no")
        seed, allowed = (
            "" if pair.seed is None else str(pair.seed),
            f"{pair.limit:g}" if pair.limit else "nothing",
        )
        found = f"{float(pair.difference):.2g}"
        yield [pair.second, pair.first, pair.setting, seed, found, allowed, pair.tensor, word]

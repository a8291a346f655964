"""Noise: how far all of the above can be trusted."""

from __future__ import annotations

from collections.abc import Iterable

from hubring.ps.markup import Html, element, together
from hubring.workers.compare.figures import NOTHING, digits, percent
from hubring.workers.compare.findings import Load
from hubring.workers.compare.page.chart import Column, table
from hubring.workers.compare.page.material import Material, section
from hubring.workers.compare.statistics import by_chance


def noise(material: Material) -> Html:
    """What else the machine did, and how far repeats of one row were apart."""
    found = material.findings.noise
    word = "The machine was quiet." if found.quiet else "The machine was busy with something else."
    lead = together(element("strong", word, class_="yes" if found.quiet else "no"), " ", _load(material))
    said = element("ul", *(element("li", sentence) for sentence in found.said)) if found.said else None
    return section("noise", "How noisy was it?", lead, said, _few(material), _spread(found.spread.items()))


def _load(material: Material) -> str:
    load, foreign = material.findings.noise.load, material.findings.noise.foreign or Load()
    said = []
    if foreign.median is not None and foreign.max is not None:
        said.append(f"Of its time other programs took {percent(foreign.median)} in the median run,")
        said.append(f"{percent(foreign.max)} at most.")
    if load.median is None or load.max is None:
        said.append("Its load was not recorded.")
    else:
        said.append(f"1-minute load: median {digits(load.median, 2)}, at most {digits(load.max, 2)}.")
    return " ".join(said)


def _few(material: Material) -> Html | None:
    """What so few seeds cannot tell."""
    said = by_chance(material.findings.seeds)
    return element("p", said) if said else None


def _spread(spreads: Iterable[tuple[str, float | None]]) -> Html | None:
    lines = [[row, NOTHING if share is None else percent(share)] for row, share in spreads]
    heads = (Column("row"), Column("spread of the step time"))
    return (
        table("How far repeats of a row were apart, relative to their median", heads, lines)
        if lines
        else None
    )

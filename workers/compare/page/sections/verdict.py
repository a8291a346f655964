"""The verdict: the first thing that is read, and all that many will read."""

from __future__ import annotations

from hubring.ps.markup import Html, element
from hubring.workers.compare.circumstance import words
from hubring.workers.compare.page.material import Material


def verdict(material: Material) -> Html:
    """Its first sentence large, the others below."""
    said = material.findings.verdict or ["This experiment came to no verdict."]
    about = material.findings.experiment.get("about")
    return element(
        "header",
        element("p", "Hub or ring? · ps-compare", class_="kicker"),
        element("h1", said[0]),
        element("ul", *(element("li", sentence) for sentence in said[1:])) if said[1:] else None,
        element("p", about, class_="about") if about else None,
        element("p", _byline(material), class_="byline"),
    )


def _byline(material: Material) -> str:
    """What was run, in one line."""
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

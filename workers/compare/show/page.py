"""The page: one HTML file without external files, scripts or network access.

Its first screen is the answer in one sentence, one chart and a table of three columns, fastest first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from markupsafe import Markup

from hubring.ps.page.kit.figures import NOTHING
from hubring.ps.page.kit.templating import Templates, style_sheet
from hubring.workers.compare.decide.decision import SPEED, ratio
from hubring.workers.compare.plan.row import EVERY
from hubring.workers.compare.plan.setting import words
from hubring.workers.compare.record.findings import Findings, RowResult
from hubring.workers.compare.record.statistics import CONFIDENCE, ENOUGH
from hubring.workers.compare.show.material import Label, NumberTable, PageContent
from hubring.workers.compare.show.progress import accuracy, loss, staleness
from hubring.workers.compare.show.scaling import predictions, scaling
from hubring.workers.compare.show.speed import bandwidth, bar, breakdown, numbers, reach, throughput
from hubring.workers.compare.show.trust import gate, noise, repeat, trust


def sentences(material: PageContent) -> dict[str, Any] | None:
    """Returns the whole verdict; None if there is none."""
    said = material.findings.verdict
    return {"title": "The results in words", "sentences": said} if said else None


SECTIONS: Mapping[str, tuple[str, Callable[[PageContent], Mapping[str, Any] | None]]] = {
    "words": ("In words", sentences),
    "gate": ("Gate", gate),
    "accuracy": ("Progress by time", accuracy),
    "loss": ("Progress by samples", loss),
    "throughput": ("Throughput", throughput),
    "breakdown": ("Step time", breakdown),
    "staleness": ("Staleness", staleness),
    "scaling": ("Scaling", scaling),
    "predictions": ("Predictions", predictions),
    "bandwidth": ("Bandwidth", bandwidth),
    "numbers": ("All numbers", numbers),
    "noise": ("Noise", noise),
    "repeat": ("Run again", repeat),
}
"""In page order: id, name in the list of contents, and the function for its content.

A section's template is named after its id.
"""

_TEMPLATES = Templates(__package__)


def page(findings: Findings) -> str:
    """Returns the report of an experiment as an HTML document.

    Args:
        findings: The result of `decode`, without the speeds of withheld rows.
    """
    material = PageContent.of(findings)
    made = [(name, title, make(material)) for name, (title, make) in SECTIONS.items()]
    return _TEMPLATES.render(
        "report.html",
        style=Markup(style_sheet(__package__)),  # noqa: S704 - ours
        material=material,
        first=first(material),
        sections=[each for each in made if each[2] is not None],
        absent=[title.lower() for _, title, section in made if section is None],
    )


def first(material: PageContent) -> dict[str, Any]:
    """Returns the first screen, with the rows of the first setting."""
    findings, panel = material.findings, material.panels[0]
    base = next((each for each in panel.entries if each.row == "ring"), panel.entries[0])
    entries = sorted(panel.entries, key=lambda entry: entry.median(SPEED) or 0.0, reverse=True)
    bars = [bar(material, entry)._replace(label=_explained(material, entry)) for entry in entries]
    against = f"times {base.row}"
    speed = material.figures[SPEED]
    lines = [[entry.row, speed.interval(entry.number(SPEED)), _against(entry, base)] for entry in entries]
    return {
        "answer": findings.answer or next(iter(findings.verdict), "No verdict for this experiment."),
        "title": panel.title,
        "bars": [each for each in bars if each.length],
        "reach": reach(bars),
        "table": NumberTable(
            _caption(panel.title, findings.seeds, against), ["row", speed.head, against], lines
        ),
        "byline": byline(material),
        "trust": trust(material.findings),
    }


def byline(material: PageContent) -> str:
    """Returns what was run, in one line."""
    findings = material.findings
    seeds = "one seed" if findings.seeds == 1 else f"{findings.seeds} seeds"
    rows, settings = len(findings.row_names), findings.setting_keys
    where = words(findings.setting(settings[0])) if len(settings) == 1 else f"{len(settings)} settings"
    parts = [material.job.name, f"{rows} way{'s' if rows != 1 else ''} to train", where, seeds]
    return " · ".join(parts)


def _explained(material: PageContent, entry: RowResult) -> Label:
    """Returns a row's name, with what it does and emulates."""
    label = material.label(entry)
    about = EVERY[entry.row].about if entry.row in EVERY else None
    return label._replace(beside="; ".join(filter(None, [about, label.beside])) or None)


def _caption(title: str, seeds: int, against: str) -> str:
    """Returns what the speeds and their intervals are."""
    if seeds == 1:
        return f"Speed with {title}, and one seed"
    interval = "range" if seeds < ENOUGH else f"{CONFIDENCE:.0%} interval"
    return (
        f"Speed with {title}: median of {seeds} seeds (whiskers: {interval}); {against}: geometric mean of"
        f" the seeds' own ratios ({CONFIDENCE:.0%} interval)"
    )


def _against(entry: RowResult, base: RowResult) -> str:
    """Returns a row's speed divided by that of the base row."""
    mine, theirs = entry.number(SPEED), base.number(SPEED)
    if mine is None or theirs is None:
        return NOTHING
    found = ratio(mine.values, theirs.values)
    return NOTHING if found is None else str(found)

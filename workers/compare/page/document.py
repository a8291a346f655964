"""The page: one HTML file without external files, scripts or network access."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from markupsafe import Markup

from hubring.ps.page.kit.style import style
from hubring.ps.page.kit.templating import Templates
from hubring.workers.compare.page.material import Material
from hubring.workers.compare.page.sections.bandwidth import bandwidth
from hubring.workers.compare.page.sections.breakdown import breakdown
from hubring.workers.compare.page.sections.gate import gate
from hubring.workers.compare.page.sections.noise import noise
from hubring.workers.compare.page.sections.numbers import numbers
from hubring.workers.compare.page.sections.predictions import predictions
from hubring.workers.compare.page.sections.progress import accuracy, loss
from hubring.workers.compare.page.sections.repeat import repeat
from hubring.workers.compare.page.sections.scaling import scaling
from hubring.workers.compare.page.sections.staleness import staleness
from hubring.workers.compare.page.sections.throughput import throughput
from hubring.workers.compare.page.sections.verdict import first, sentences
from hubring.workers.compare.result.findings import Findings

SECTIONS: Mapping[str, tuple[str, Callable[[Material], Mapping[str, Any] | None]]] = {
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
    material = Material.of(findings)
    made = [(name, title, make(material)) for name, (title, make) in SECTIONS.items()]
    return _TEMPLATES.render(
        "report.html",
        style=Markup(style(__package__)),  # noqa: S704 - ours
        material=material,
        first=first(material),
        sections=[each for each in made if each[2] is not None],
        absent=[title.lower() for _, title, section in made if section is None],
    )

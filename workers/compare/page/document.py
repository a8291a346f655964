"""The page: one HTML file that needs nothing else, neither files nor scripts nor a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from hubring.ps.markup import Html, element
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
from hubring.workers.compare.page.sections.verdict import verdict
from hubring.workers.compare.reading import read

SECTIONS: Mapping[str, tuple[str, Callable[[Material], Html | None]]] = {
    "gate": ("The gate", gate),
    "accuracy": ("Progress by time", accuracy),
    "loss": ("Progress by samples", loss),
    "throughput": ("Throughput", throughput),
    "breakdown": ("Step time", breakdown),
    "staleness": ("Staleness", staleness),
    "scaling": ("Scaling", scaling),
    "predictions": ("Predictions", predictions),
    "bandwidth": ("Bandwidth", bandwidth),
    "numbers": ("Every number", numbers),
    "noise": ("Noise", noise),
    "repeat": ("Again", repeat),
}
"""In the order of the page: id, name in the list of contents, what makes it."""

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The browser is told to fetch nothing and to run nothing: a page made of measurements has no need to."""


def page(results: Mapping[str, Any]) -> str:
    """The report of an experiment.

    Args:
        results: What `results.json`, version 2, holds; nothing else is looked at.

    Returns:
        A whole HTML document.

    Raises:
        ConfigError: The results are of another version or not what they should be.
    """
    material = Material.of(read(results))
    made = {name: make(material) for name, (_, make) in SECTIONS.items()}
    shown = [name for name, section in made.items() if section is not None]
    body = element(
        "body",
        element("a", "Skip to the verdict", href="#verdict", class_="skip"),
        _hatch(),
        element(
            "main",
            verdict(material),
            _contents(shown),
            *made.values(),
            _absent(made),
            id="verdict",
            tabindex=-1,
        ),
    )
    return "<!doctype html>\n" + element("html", _head(material), body, lang="en")


def _head(material: Material) -> Html:
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("title", f"{material.goal.job}: hub or ring?"),
        element("style", Html(files("hubring.workers.compare.page").joinpath("page.css").read_text())),
    )


def _contents(shown: Sequence[str]) -> Html:
    links = (element("li", element("a", SECTIONS[name][0], href=f"#{name}")) for name in shown)
    return element("nav", element("ul", *links), aria_label="Sections")


def _absent(made: Mapping[str, Html | None]) -> Html | None:
    """What a reader may look for and not find."""
    gone = [SECTIONS[name][0].lower() for name, section in made.items() if section is None]
    return (
        element("p", f"Not measured in this experiment: {', '.join(gone)}.", class_="absent")
        if gone
        else None
    )


def _hatch() -> Html:
    """The pattern of what is hatched, in the colour of the paper."""
    stripe = element("path", d="M0 6L6 0M-1 1L1 -1M5 7L7 5", class_="stripe")
    pattern = element("pattern", stripe, id="hatch", width=6, height=6, patternUnits="userSpaceOnUse")
    return element("svg", element("defs", pattern), class_="definitions", aria_hidden="true")

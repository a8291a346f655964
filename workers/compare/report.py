"""The report: one HTML page that needs nothing else, neither files nor a network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from workers.compare.table import FOOTNOTES, columns, lines


def page(results: Mapping[str, Any]) -> str:
    """The whole page.

    Args:
        results: As written to `results.json`.
    """
    template = Template(files("workers.compare").joinpath("report.html").read_text())
    return template.substitute(
        title=escape(
            f"{results['job']['name']}: {len(results['experiment']['rows'])} ways to train one model"
        ),
        setting=escape("; ".join(setting["key"] for setting in results["settings"])),
        verdict="\n".join(f"<li>{escape(sentence)}</li>" for sentence in results["verdict"]),
        gate=_gate(results["gate"]),
        pairs="\n".join(_pair(pair) for pair in results["gate"]["pairs"]),
        heads="".join(f"<th>{escape(head)}</th>" for head in columns(results)),
        rows="\n".join(_line(cells) for cells in lines(results)),
        footnotes="<br>".join(escape(note) for note in FOOTNOTES),
        command=escape(results["command"]),
        seed=escape(", ".join(map(str, results["experiment"]["seeds"]))),
        machine="\n".join(_line((name, str(value))) for name, value in results["machine"].items()),
        commands=escape(_programs(results["commands"])),
        plotly=get_plotlyjs(),
        # "<" as an escape: no text in the results can end the script.
        results=json.dumps(results, allow_nan=False).replace("<", "\\u003c"),
    )


def _gate(judged: Mapping[str, Any]) -> str:
    """What the gate came to, and what its number means."""
    if not judged["pairs"]:
        return "Only one synchronous row ran, so there was nothing to hold it against."
    word = '<span class="passed">Yes.</span>' if judged["passed"] else '<span class="failed">No.</span>'
    return (
        f"{word} Synchronous rows apply the same mean gradient and add it up in another order, so their "
        "parameters may differ by rounding alone: max |a - b| / max |a| of every tensor after a few steps,"
        " which training has not amplified yet, is allowed "
        f"{judged['tolerance']:g}. A second run of hub-bsp must come out the same to the last bit."
    )


def _pair(pair: Mapping[str, Any]) -> str:
    found = f"{float(pair['difference']):.2g}"
    allowed = f"{pair['limit']:g}" if pair["limit"] else "none"
    word = "passed" if pair["passed"] else "failed"
    told = (pair["second"], pair["first"], found, pair["tensor"], allowed)
    return _line(told)[: -len("</tr>")] + f'<td class="{word}">{word}</td></tr>'


def _line(texts: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>"


def _programs(commands: Mapping[str, Sequence[str]]) -> str:
    return "\n\n".join("\n".join((f"# {run}", *lines)) for run, lines in commands.items())

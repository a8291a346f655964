"""How loss and throughput went since the job began."""

from __future__ import annotations

from collections.abc import Callable

from ps.markup import Html, element
from ps.page.chart import curve
from ps.page.figures import duration, loss, number
from ps.page.history import Sample
from ps.page.memo import Memo
from ps.page.moment import Moment
from ps.page.section import Section
from ps.page.table import headed, row, table

HEADS = ("Time", "Step", "Loss", "Steps/s in all")
MOST_ROWS = 24
"""Of the table: the last of the samples, and others evenly spread before it."""


def course(moment: Moment, memo: Memo) -> Section:
    """Two curves, and the same in numbers."""
    return Section(memo("course", _made, moment.samples))


def _made(samples: tuple[Sample, ...]) -> Html:
    title = "Loss and throughput"
    if not samples:
        words = "Nothing to draw yet: the first sample is taken once the job has begun."
        return headed("course", title, element("p", words, class_="soft"))
    losses = [(each.seconds, each.loss) for each in samples if each.loss is not None]
    rates = [(each.seconds, each.rate) for each in samples]
    drawn = element(
        "div",
        _figure("loss", "Loss as the workers report it, their mean", losses, loss),
        _figure("rate", "Steps a second of all workers together", rates, number),
        class_="drawing pair",
    )
    return headed("course", title, drawn, element("div", _numbers(samples), class_="numbers"))


def _figure(
    name: str, title: str, points: list[tuple[float, float]], write: Callable[[float], str]
) -> Html:
    if not points:
        words = "No worker has reported one; workers.report(loss=...) in the script does."
        return element("figure", element("figcaption", title), element("p", words, class_="soft"))
    said = f"{title}: {write(points[-1][1])}"
    return element("figure", element("figcaption", said), curve(name, title, points, write))


def _numbers(samples: tuple[Sample, ...]) -> Html:
    apart = -(-len(samples) // MOST_ROWS)
    rows = [
        row(duration(each.seconds), f"{each.step:,}", loss(each.loss), number(each.rate))
        for each in samples[::-1][::apart]
    ]
    return table("course-table", "The job's course, the newest first; time since the server began", HEADS, rows)

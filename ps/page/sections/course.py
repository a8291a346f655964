"""How loss and throughput went since the job began."""

from __future__ import annotations

from collections.abc import Callable

from hubring.ps.markup import Html, element
from hubring.ps.page.chart import curve
from hubring.ps.page.figures import duration, loss, number
from hubring.ps.page.history import Sample
from hubring.ps.page.memo import Memo
from hubring.ps.page.moment import Moment
from hubring.ps.page.section import Section
from hubring.ps.page.table import headed, row, table

HEADS = ("Time", "Step", "Loss", "Steps/s in all")
CAPTION = "The job's course, the newest first; time since the server began"
MOST_ROWS = 24
"""Of the table: the last of the samples, and others evenly spread before it."""


def course(moment: Moment, memo: Memo) -> Section:
    """Two curves, and the same in numbers."""
    rows = {_name(each): memo(_name(each), _row, each) for each in _told(moment.samples)}
    return Section(memo("course", _made, moment.samples), rows)


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
    return headed(
        "course", title, drawn, element("div", table("course-table", CAPTION, HEADS), class_="numbers")
    )


def _figure(name: str, title: str, points: list[tuple[float, float]], write: Callable[[float], str]) -> Html:
    if not points:
        words = "No worker has reported one; hubring.report(loss=...) in the script does."
        return element("figure", element("figcaption", title), element("p", words, class_="soft"))
    said = f"{title}: {write(points[-1][1])}"
    return element("figure", element("figcaption", said), curve(name, title, points, write))


def _told(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """The newest first; those before it are always the same ones, until there are too many."""
    apart = -(-len(samples) // MOST_ROWS)
    return tuple(dict.fromkeys((*samples[-1:], *samples[:: apart or 1][::-1])))


def _row(sample: Sample) -> Html:
    told = f"{sample.step:,}", loss(sample.loss), number(sample.rate)
    return row(duration(sample.seconds), *told, name=_name(sample))


def _name(sample: Sample) -> str:
    return f"sample-{1000 * sample.seconds:.0f}"

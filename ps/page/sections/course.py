"""How loss and throughput went since the job began."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup

from hubring.ps.page.history import Sample
from hubring.ps.page.kit.chart import Axis, path
from hubring.ps.page.kit.figures import loss, number
from hubring.ps.page.kit.scale import Linear
from hubring.ps.page.markup_cache import MarkupCache
from hubring.ps.page.section import TEMPLATES, Section
from hubring.ps.page.snapshot import Snapshot

MOST_ROWS = 24
"""Of the table: the last of the samples, and others evenly spread before it."""

_MACROS = TEMPLATES.macros("course.html")


def curve(
    name: str, title: str, points: Sequence[tuple[float, float]], write: Callable[[float], str]
) -> dict[str, Any]:
    """What is drawn of these points.

    Args:
        name: What ids begin with.
        title: What is drawn.
        points: Seconds, rising, and values.
        write: Spells a value.
    """
    if not points:
        return {"title": title, "path": ""}
    scale = Linear.around((value for _, value in points), most=5)
    (begin, first), (end, last) = points[0], points[-1]
    across = end - begin or 1.0
    # One sample alone would be a line without length: it goes level through the drawing.
    drawn = points if len(points) > 1 else [(begin, first), (begin + across, first)]
    return {
        "name": name,
        "title": title,
        "path": path(((at - begin) / across, scale.place(value)) for at, value in drawn),
        "levels": Axis(scale, write=write).ticks,
        "begin": begin,
        "end": end,
        "across": across,
        "first": write(first),
        "last": write(last),
    }


def course(snapshot: Snapshot, cache: MarkupCache) -> Section:
    """Two curves, and the same in numbers."""
    rows = {
        _name(each): cache(_name(each), _MACROS.row, _name(each), each) for each in _told(snapshot.samples)
    }
    return Section(cache("course", _made, snapshot.samples), rows)


def _made(samples: tuple[Sample, ...]) -> Markup:
    losses = [(each.seconds, each.loss) for each in samples if each.loss is not None]
    rates = [(each.seconds, each.rate) for each in samples]
    curves = (
        curve("loss", "Loss as the workers report it, their mean", losses, loss),
        curve("rate", "Steps a second of all workers together", rates, number),
    )
    made: Markup = _MACROS.section(curves if samples else ())
    return made


def _told(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """The newest first; those before it are always the same ones, until there are too many."""
    apart = -(-len(samples) // MOST_ROWS)
    return tuple(dict.fromkeys((*samples[-1:], *samples[:: apart or 1][::-1])))


def _name(sample: Sample) -> str:
    return f"sample-{1000 * sample.seconds:.0f}"

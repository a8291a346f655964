"""The section with loss and throughput since the job began."""

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
"""Limit on the table's rows: the last sample, and evenly spaced samples before it."""

_MACROS = TEMPLATES.macros("course.html")


def curve(
    name: str, title: str, points: Sequence[tuple[float, float]], write: Callable[[float], str]
) -> dict[str, Any]:
    """Returns the template's values for one curve.

    Args:
        name: Prefix of the ids.
        title: The curve's title.
        points: Pairs of seconds and value, with rising seconds.
        write: Formats a value.
    """
    if not points:
        return {"title": title, "path": ""}
    scale = Linear.around((value for _, value in points), most=5)
    (begin, first), (end, last) = points[0], points[-1]
    across = end - begin or 1.0
    # A single sample becomes a horizontal line, because a line of length 0 is invisible.
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
    """Renders two curves, and the same samples as a table."""
    rows = {
        _name(each): cache(_name(each), _MACROS.row, _name(each), each) for each in _listed(snapshot.samples)
    }
    return Section(cache("course", _made, snapshot.samples), rows)


def _made(samples: tuple[Sample, ...]) -> Markup:
    losses = [(each.seconds, each.loss) for each in samples if each.loss is not None]
    rates = [(each.seconds, each.rate) for each in samples]
    curves = (
        curve("loss", "Loss, mean over workers", losses, loss),
        curve("rate", "Steps per second, all workers together", rates, number),
    )
    made: Markup = _MACROS.section(curves if samples else ())
    return made


def _listed(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """Returns the table's samples, newest first. All but the newest are stable until the spacing grows."""
    apart = -(-len(samples) // MOST_ROWS)
    return tuple(dict.fromkeys((*samples[-1:], *samples[:: apart or 1][::-1])))


def _name(sample: Sample) -> str:
    return f"sample-{1000 * sample.seconds:.0f}"

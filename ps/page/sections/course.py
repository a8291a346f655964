"""The section with the curves of loss, throughput and metrics since the job began."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
        # For the script, which shows the value under the pointer.
        "times": " ".join(f"{at:.0f}" for at, _ in points),
        "readings": " ".join(write(value) for _, value in points),
    }


def course(snapshot: Snapshot, cache: MarkupCache) -> Section:
    """Renders the curves, and the same samples as a table."""
    names = _metrics(snapshot.samples)
    rows = {
        _name(each): cache(_name(each), _MACROS.row, _name(each), each, _cells(each, names))
        for each in _listed(snapshot.samples)
    }
    return Section(cache("course", _made, snapshot.samples), rows)


def _made(samples: tuple[Sample, ...]) -> Markup:
    made: Markup = _MACROS.section(tuple(_curves(samples)) if samples else (), _metrics(samples))
    return made


def _curves(samples: tuple[Sample, ...]) -> Iterator[dict[str, Any]]:
    losses = [(each.seconds, each.loss) for each in samples if each.loss is not None]
    yield curve("loss", "Loss, mean over workers", losses, loss)
    rates = [(each.seconds, each.rate) for each in samples]
    yield curve("rate", "Steps per second, all workers together", rates, number)
    if any(each.samples_rate for each in samples):
        speeds = [(each.seconds, each.samples_rate) for each in samples]
        yield curve("speed", "Samples per second, all workers together", speeds, number)
    for index, name in enumerate(_metrics(samples)):
        points = [(each.seconds, value) for each in samples for known, value in each.metrics if known == name]
        yield curve(f"metric-{index}", name, points, loss)


def _metrics(samples: tuple[Sample, ...]) -> tuple[str, ...]:
    """Returns the names of the metrics that workers report now."""
    return tuple(name for name, _ in samples[-1].metrics) if samples else ()


def _cells(sample: Sample, names: tuple[str, ...]) -> tuple[str, ...]:
    values = dict(sample.metrics)
    return tuple(loss(values.get(name)) for name in names)


def _listed(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """Returns the table's samples, newest first. All but the newest are stable until the spacing grows."""
    apart = -(-len(samples) // MOST_ROWS)
    return tuple(dict.fromkeys((*samples[-1:], *samples[:: apart or 1][::-1])))


def _name(sample: Sample) -> str:
    return f"sample-{1000 * sample.seconds:.0f}"

"""The topology chart: workers on an arc above the shards, or on a circle as a ring.

The row of shards lies between the tangents at the arc's ends, so no link crosses another worker or shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from markupsafe import Markup

from hubring.ps.page.kit.figures import size
from hubring.ps.page.sections import TEMPLATES, MarkupCache, Section, state_class
from hubring.ps.page.snapshot import ShardSnapshot, Snapshot, WorkerState, meaning

SIDE = 400
"""The chart's width and height; the browser scales it to its box."""

MIDDLE = SIDE / 2
RIM = 158
"""Radius of the circle of workers."""

ARC = 0.65 * math.pi
"""Angle of the arc of a hub's workers."""

ARC_MIDDLE = 205.0
"""Distance of the arc's centre from the top."""

LARGEST, SMALLEST = 20.0, 2.0
"""Limits on the radius of a worker."""

ROW_TOP, ROW_HEIGHT = 324.0, 60.0
"""The row of shards: distance from the top, and height."""

PLACE = {"side": SIDE, "middle": MIDDLE}
"""What the template needs of the layout."""

WIDEST, GAP = 104.0, 8.0
"""Limits on the width of a shard, and on the gap to the next one."""


class PicturePoint(NamedTuple):
    """Distances from the left and from the top."""

    x: float
    y: float

    def __str__(self) -> str:
        return f"{self.x:.1f} {self.y:.1f}"


def on_circle(index: float, count: int, radius: float) -> PicturePoint:
    """Returns the position of one of `count` items, clockwise from the top."""
    angle = 2 * math.pi * index / count - math.pi / 2
    return PicturePoint(MIDDLE + radius * math.cos(angle), MIDDLE + radius * math.sin(angle))


def on_arc(index: int, count: int, radius: float) -> PicturePoint:
    """Returns the position of one of `count` items on the arc, from left to right."""
    angle = ARC * ((index + 0.5) / count - 0.5) - math.pi / 2
    return PicturePoint(MIDDLE + radius * math.cos(angle), ARC_MIDDLE + radius * math.sin(angle))


def worker_radius(count: int, angle: float = 2 * math.pi) -> float:
    """Returns the radius with which `count` workers fit on `angle` of the circle."""
    return max(SMALLEST, min(LARGEST, 0.35 * angle * RIM / count))


class ShardBox(NamedTuple):
    """The place of a shard."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> PicturePoint:
        return PicturePoint(self.x + self.width / 2, self.y + self.height / 2)

    @property
    def top(self) -> PicturePoint:
        """Where links end."""
        return PicturePoint(self.x + self.width / 2, self.y)


def shard_boxes(count: int) -> tuple[ShardBox, ...]:
    """Returns the boxes of `count` shards in the row."""
    apart = min(WIDEST + GAP, SIDE / max(1, count))
    width = apart - min(GAP, apart / 4)
    left = MIDDLE - count * apart / 2 + (apart - width) / 2
    return tuple(ShardBox(left + index * apart, ROW_TOP, width, ROW_HEIGHT) for index in range(count))


_MACROS = TEMPLATES.macros("picture.html")

SIGNS: Mapping[WorkerState, str] = {
    "blocked": "…",
    "silent": "!",
    "finished": "✓",
    "stopped": "■",
    "failed": "✗",
    "lost": "✗",
}
"""A sign next to a worker in some states, so that colour is never the only mark of a state."""

_ALIVE = ("training", "blocked")

ROOM_FOR_WORDS = 11.0
"""Smallest radius of a worker that shows the rank inside its circle."""

RING_LABELS, ARC_LABELS = 32, 16
"""How many ranks are shown next to a ring's and a hub's workers if the circles are too small for them."""

MANY_LINKS = 64
"""Links are thin if there are more than this."""

EMPTY = ("holds", "nothing")
"""The lines under the name of a shard without slices, which has no links."""

ROOM_FOR_TRAFFIC, ROOM_FOR_NUMBER = 66.0, 15.0
"""Smallest widths of a shard that shows its traffic and its number."""


def picture_section(snapshot: Snapshot, cache: MarkupCache) -> Section:
    """Renders one element per worker, with its links, and one per shard; small until the job starts."""
    many = len(snapshot.workers) * max(1, len(snapshot.shards)) > MANY_LINKS
    middle = "ring" if snapshot.on_ring else "" if snapshot.shards else "no shard yet"
    rows = dict(_rows(snapshot, cache)) if snapshot.workers else {}
    shown = (_title(snapshot), _description(snapshot), middle, many, not snapshot.report["started"])
    return Section(cache("picture", _MACROS.section, PLACE, bool(rows), *shown, tuple(_key(snapshot))), rows)


def _title(snapshot: Snapshot) -> str:
    count = len(snapshot.workers)
    workers = f"{count} worker{'' if count == 1 else 's'}"
    if snapshot.on_ring:
        return f"A ring of {workers}"
    shards = len(snapshot.shards)
    return f"A hub of {shards} shard{'' if shards == 1 else 's'} and {workers}"


def _description(snapshot: Snapshot) -> str:
    counts = ", ".join(f"{count} {meaning(state)}" for state, count in snapshot.counts.items())
    return f"Workers: {counts or 'none yet'}."


def _rows(snapshot: Snapshot, cache: MarkupCache) -> Iterator[tuple[str, Markup]]:
    """Yields the rows. Workers come before shards, because their links must lie under the shards."""
    count, workers = len(snapshot.workers), snapshot.workers
    shards = () if snapshot.on_ring else snapshot.shards
    boxes = shard_boxes(len(shards))
    holding = tuple(box.top for box, shard in zip(boxes, shards, strict=True) if shard.keys)
    for index, worker in enumerate(workers):
        name = f"node-{worker.rank}"
        other = workers[(index + 1) % count] if snapshot.on_ring else worker
        link, ends = _kind_of_link(worker.state, other.state), None if snapshot.on_ring else holding
        shown = (worker.rank, worker.state, worker.where, worker.why)
        yield name, cache(name, _worker, shown, index, count, link, ends)
    for shard, box in zip(shards, boxes, strict=True):
        name = f"box-{shard.index}"
        yield name, cache(name, _shard, shard.index, shard.where, _traffic(shard), shard.silent > 0, box)


def _kind_of_link(one: WorkerState, other: WorkerState) -> str:
    """Returns the CSS class of a link between two workers' states."""
    if one == other == "training":
        return "flowing"
    return "waiting" if one in _ALIVE and other in _ALIVE else "idle"


def _worker(
    shown: tuple[int, WorkerState, str, str],
    index: int,
    count: int,
    link: str,
    shards: tuple[PicturePoint, ...] | None,
) -> Markup:
    """Renders a worker with its links: to these points of shards, or to the next worker if they are None."""
    rank, state, where, why = shown
    place = on_circle if shards is None else on_arc
    radius = worker_radius(count) if shards is None else worker_radius(count, ARC)
    here = place(index, count, RIM)
    within = radius >= ROOM_FOR_WORDS
    there = f" on {where}" if where else ""
    words = f"rank {rank}{there}: {meaning(state)}{f', {why}' if why else ''}"
    course = _arc(index, count) if shards is None else "".join(f"M{here}L{spot}" for spot in shards)
    apart = -(-count // (RING_LABELS if shards is None else ARC_LABELS))
    beside = place(index, count, RIM + radius + 13), _beside(rank, state, within, index % apart == 0)
    made: Markup = _MACROS.worker(
        rank, state_class(state), words, link, course, here, radius, within, *beside
    )
    return made


def _arc(index: int, count: int) -> str:
    """Returns the arc between the edges of two neighbours in a ring; empty for a ring of one."""
    if count == 1:
        return ""
    edge = count * worker_radius(count) / (2 * math.pi * RIM)
    here, there = on_circle(index + edge, count, RIM), on_circle(index + 1 - edge, count, RIM)
    return f"M{here}A{RIM} {RIM} 0 0 1 {there}"


def _beside(rank: int, state: WorkerState, within: bool, labelled: bool) -> str:
    """Returns the text next to a worker: the state's sign, and the rank if the circle is too small for it."""
    sign = SIGNS.get(state, "")
    return f"{rank}{sign}" if not within and (labelled or sign) else sign


def _traffic(shard: ShardSnapshot) -> tuple[str, ...]:
    """Returns the lines under a shard's name."""
    if not shard.keys:
        return EMPTY
    return f"in {size(shard.bytes_in)}", f"out {size(shard.bytes_out)}"


def _shard(index: int, where: str, traffic: tuple[str, ...], silent: bool, box: ShardBox) -> Markup:
    empty = traffic == EMPTY
    said = " ".join(traffic) if empty else ", ".join(traffic)
    words = f"shard {index} on {where}: {said}{', silent' if silent else ''}"
    lines = [str(index)] if box.width >= ROOM_FOR_NUMBER else []
    if box.width >= ROOM_FOR_TRAFFIC:
        lines = [f"shard {index}", *traffic]
    made: Markup = _MACROS.shard(index, silent, empty, words, lines, box)
    return made


def _key(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """Yields the key: the CSS class and the text of every state that occurs."""
    for state, count in snapshot.counts.items():
        yield state_class(state), f"{SIGNS.get(state, '')} {count} {meaning(state)}".lstrip()

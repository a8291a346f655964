"""The picture of the topology: workers on a circle, around their shards or linked to a ring."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from hubring.ps.markup import Html, element, together
from hubring.ps.page.figures import size
from hubring.ps.page.memo import Memo
from hubring.ps.page.moment import Moment, Shard, State
from hubring.ps.page.place import MIDDLE, RIM, SIDE, Box, Point, on_circle, shard_box, worker_radius
from hubring.ps.page.section import ROWS, Section
from hubring.ps.page.sections.workers import kind
from hubring.ps.page.table import headed

SIGNS: Mapping[State, str] = {
    "training": "",
    "held up": "…",
    "silent": "!",
    "joined": "",
    "missing": "",
    "finished": "✓",
    "stopped": "■",
    "failed": "✗",
    "lost": "✗",
}
"""Beside a worker, so that no state is told by its colour alone."""

MEANINGS: Mapping[State, str] = {
    "training": "training",
    "held up": "held up by others",
    "silent": "silent",
    "joined": "waiting for the start",
    "missing": "not there",
    "finished": "finished",
    "stopped": "stopped, as asked",
    "failed": "failed",
    "lost": "lost",
}

_ALIVE = ("training", "held up")

ROOM_FOR_WORDS = 11.0
"""Radius from which on a worker's rank stands within it."""

MOST_LABELS = 32
"""Ranks that are written around the circle where there is no room within."""

MANY_LINKS = 64
"""From so many on they are drawn thin."""


def picture(moment: Moment, memo: Memo) -> Section:
    """One element a worker with its links, and one a shard."""
    rows = dict(_rows(moment, memo))
    drawing = element(
        "svg",
        element("title", _title(moment), id="picture-name"),
        element("desc", _said(moment), id="picture-said"),
        element("circle", cx=MIDDLE, cy=MIDDLE, r=RIM, class_="rim") if not rows else None,
        ROWS,
        _middle(moment),
        viewBox=f"0 0 {SIDE} {SIDE}",
        class_="topology many"
        if len(moment.workers) * max(1, len(moment.shards)) > MANY_LINKS
        else "topology",
        role="img",
        aria_labelledby="picture-name",
        aria_describedby="picture-said",
    )
    inner = element("div", drawing, _key(moment), class_="drawing topology-box")
    numbers = element("p", f"{_title(moment)}. {_said(moment)}", class_="numbers")
    return Section(headed("picture", "Topology", inner, numbers), rows)


def _title(moment: Moment) -> str:
    count = len(moment.workers)
    workers = f"{count} worker{'' if count == 1 else 's'}"
    if moment.on_ring:
        return f"A ring of {workers}"
    shards = len(moment.shards)
    return f"A hub of {shards} shard{'' if shards == 1 else 's'} and {workers}"


def _said(moment: Moment) -> str:
    counts = ", ".join(f"{count} {MEANINGS[state]}" for state, count in moment.counts.items())
    return f"Workers: {counts or 'none yet'}."


def _rows(moment: Moment, memo: Memo) -> Iterator[tuple[str, Html]]:
    """Links lie under what they link, so workers, who bring them, come before the shards."""
    count, workers = len(moment.workers), moment.workers
    box = shard_box(len(moment.shards))
    spots = tuple(on_circle(index, len(moment.shards), box.away) for index in range(len(moment.shards)))
    for index, worker in enumerate(workers):
        name = f"node-{worker.rank}"
        other = workers[(index + 1) % count] if moment.on_ring else worker
        link, ends = _kind_of_link(worker.state, other.state), None if moment.on_ring else spots
        told = (worker.rank, worker.state, worker.where, worker.why)
        yield name, memo(name, _worker, told, index, count, link, ends)
    for shard, spot in zip(moment.shards, spots, strict=True):
        name = f"box-{shard.index}"
        yield name, memo(name, _shard, shard.index, shard.where, _traffic(shard), shard.silent > 0, spot, box)


def _kind_of_link(one: State, other: State) -> str:
    """What goes between the two, as a class."""
    if one == other == "training":
        return "flowing"
    return "waiting" if one in _ALIVE and other in _ALIVE else "idle"


def _worker(
    told: tuple[int, State, str, str], index: int, count: int, link: str, shards: tuple[Point, ...] | None
) -> Html:
    """A worker with its links: to every shard, or to the next worker where `shards` is None."""
    rank, state, where, why = told
    radius, here = worker_radius(count), on_circle(index, count, RIM)
    within = radius >= ROOM_FOR_WORDS
    there = f" on {where}" if where else ""
    words = f"rank {rank}{there}: {MEANINGS[state]}{f', {why}' if why else ''}"
    course = _arc(index, count) if shards is None else "".join(f"M{here}L{spot}" for spot in shards)
    return element(
        "g",
        element("path", d=course, class_=f"link {link}") if course else None,
        element("circle", element("title", words), cx=here.x, cy=here.y, r=radius),
        element("text", str(rank), x=here.x, y=here.y, dy="0.35em", class_="rank") if within else None,
        _beside(rank, state, index, count, within),
        id=f"node-{rank}",
        class_=kind(state),
    )


def _arc(index: int, count: int) -> str:
    """From the edge of one worker of a ring to that of the next; from one alone to nobody."""
    if count == 1:
        return ""
    edge = count * worker_radius(count) / (2 * math.pi * RIM)
    here, there = on_circle(index + edge, count, RIM), on_circle(index + 1 - edge, count, RIM)
    return f"M{here}A{RIM} {RIM} 0 0 1 {there}"


def _beside(rank: int, state: State, index: int, count: int, within: bool) -> Html | None:
    """Outside the circle: the sign of a state, and the rank where it has no room within."""
    apart = -(-count // MOST_LABELS)
    number = "" if within or (index % apart and not SIGNS[state]) else str(rank)
    words = f"{number}{SIGNS[state]}"
    if not words:
        return None
    spot = on_circle(index, count, RIM + worker_radius(count) + 13)
    return element("text", words, x=spot.x, y=spot.y, dy="0.35em", class_="sign")


def _traffic(shard: Shard) -> tuple[str, str]:
    return size(shard.bytes_in), size(shard.bytes_out)


def _shard(index: int, where: str, traffic: tuple[str, str], silent: bool, spot: Point, box: Box) -> Html:
    came, went = traffic
    words = f"shard {index} on {where}: {came} in, {went} out{', silent' if silent else ''}"
    lines = [str(index)] if box.height < 40 else [f"shard {index}", f"in {came}", f"out {went}"]
    first = spot.y - 7.5 * (len(lines) - 1)
    return element(
        "g",
        element(
            "rect",
            element("title", words),
            x=spot.x - box.width / 2,
            y=spot.y - box.height / 2,
            width=box.width,
            height=box.height,
            rx=6,
        ),
        *(
            element(
                "text", line, x=spot.x, y=first + 15 * at, dy="0.35em", class_="name" if at == 0 else None
            )
            for at, line in enumerate(lines)
        ),
        id=f"box-{index}",
        class_="shard is-silent" if silent else "shard",
    )


def _middle(moment: Moment) -> Html | None:
    """What stands in the middle where no shard does."""
    if moment.shards:
        return None
    words = "ring" if moment.on_ring else "no shard yet"
    return element("text", words, x=MIDDLE, y=MIDDLE, dy="0.35em", class_="middle")


def _key(moment: Moment) -> Html:
    items = [_entry(state, count) for state, count in moment.counts.items()]
    return element("ul", *items, class_="key", aria_hidden="true")


def _entry(state: State, count: int) -> Html:
    dot = element("circle", cx=7, cy=7, r=5.5)
    drawn = element("svg", dot, width=14, height=14, class_=kind(state))
    sign = f"{SIGNS[state]} " if SIGNS[state] else ""
    return element("li", drawn, together(f" {sign}{count} {MEANINGS[state]}"))

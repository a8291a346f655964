"""Scaling: what more workers and more servers bring, measured and predicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from workers.compare.figures import NOTHING, digits, signed
from workers.compare.findings import Crossover, Prediction, Scaling
from workers.compare.page.chart import Axis, Column, figure, table
from workers.compare.page.chart_lines import Line, Spot, lines, upright
from workers.compare.page.element import Html, element
from workers.compare.page.mark import Mark
from workers.compare.page.material import Material, folded, section
from workers.compare.page.scale import Linear, Log
from workers.compare.page.setting import without_servers, words

LEGEND = "Symbols are measured, thin lines predicted."


def scaling(material: Material) -> Html | None:
    """Throughput by workers, step time by servers, and where hub and ring cross."""
    servers = [_by_servers(material, *each) for each in enumerate(_crossed(material))]
    found = [*([_by_workers(material)] if material.findings.scaling else []), *servers]
    drawn = _crossed(material)
    others = _crossings(
        each for each in material.findings.crossover if without_servers(each.setting) not in drawn
    )
    if not found and others is None:
        return None
    lead = f"{LEGEND} Where hub and ring cross is marked: from there on the hub is faster."
    return section("scaling", "With more workers, with more servers", lead, others, folded(found, "setting"))


def _by_workers(material: Material) -> Html:
    rows = material.findings.scaling
    x = Axis(Log.of(size for row in rows for size in row.workers), "workers, log scale")
    y = Axis(Linear.around(_shares(rows), zero=True), f"{material.goal.samples}/s and worker")
    drawn = list(chain.from_iterable(_pair(material, row) for row in rows))
    heads = (Column("row"), Column("workers"), Column("measured"), Column("predicted"), Column("off by"))
    told = table(f"{material.goal.samples.capitalize()}/s by workers", heads, _lines(material, rows))
    name, key = "scaling-workers", material.key(row.row for row in rows)
    rules = [upright(at, x, f"{row} overtakes", place) for place, (row, at) in enumerate(_overtaking(rows))]
    title = "What each worker gets done, by their number"
    return figure(name, title, _says(rows), lines(name, drawn, x, y, rules), told, key)


def _shares(rows: Iterable[Scaling]) -> list[float]:
    """Throughput of one worker: level where scaling is perfect, so that its loss can be seen."""
    both = ((row.workers, values) for row in rows for values in (row.measured, row.predicted))
    return [v / n for sizes, values in both for n, v in zip(sizes, values, strict=True) if v is not None]


def _overtaking(rows: Sequence[Scaling]) -> list[tuple[str, int]]:
    """Hub rows with the number of workers from which on, as predicted, they are ahead of the ring."""
    speeds = {row.row: dict(zip(row.workers, row.predicted, strict=True)) for row in rows}
    ring = {n: v for n, v in speeds.pop("ring", {}).items() if v is not None}
    found = []
    for row, mine in speeds.items():
        behind = [n for n, v in ring.items() if (mine.get(n) or 0.0) <= v]
        ahead = [n for n in ring if n > max(behind, default=0)]
        found += [(row, min(ahead))] if row.startswith("hub-") and behind and ahead else []
    return found


def _pair(material: Material, row: Scaling) -> list[Line]:
    """What was measured as symbols, what is predicted as a thin line."""
    mark, label = material.marks[row.row], material.name_under(row.row)
    points = zip(row.workers, row.measured, row.predicted, strict=True)
    return _both(
        mark, label, ((n, real and real / n, thought and thought / n) for n, real, thought in points)
    )


def _both(mark: Mark, label: str, points: Iterable[tuple[float, float | None, float | None]]) -> list[Line]:
    known = list(points)
    measured = [Spot.at(x, y) for x, y, _ in known if y is not None]
    predicted = [Spot.at(x, y) for x, _, y in known if y is not None]
    return [
        Line(mark, label, predicted, predicted=True),
        Line(mark, label, measured, symbols=True, joined=False),
    ]


def _says(rows: Sequence[Scaling]) -> str:
    known = [(row, [n for n, value in zip(row.workers, row.measured, strict=True) if value]) for row in rows]
    told = [f"{row.row} measured with up to {max(sizes)} workers" for row, sizes in known if sizes]
    far = max(size for row in rows for size in row.workers)
    ahead = [
        f" {row} overtakes the ring from {at:,} workers on, as predicted." for row, at in _overtaking(rows)
    ]
    return f"{'; '.join(told) or 'Nothing was measured'}; predicted up to {far:,}.{''.join(ahead)}"


def _lines(material: Material, rows: Iterable[Scaling]) -> Iterable[list[str | Html]]:
    for row in rows:
        for size, real, thought in zip(row.workers, row.measured, row.predicted, strict=True):
            off = NOTHING if real is None or thought is None else signed(thought / real - 1)
            yield [material.name_under(row.row), f"{size:,}", _number(real), _number(thought), off]


def _number(value: float | None) -> str:
    return NOTHING if value is None else digits(value)


def _crossed(material: Material) -> list[str]:
    """Settings, without servers, of which hub rows with several numbers of servers were predicted."""
    keys = dict.fromkeys(without_servers(each.setting) for each in material.findings.predictions)
    return [key for key in keys if len(_servers(material, _of(material, key))) > 1]


def _of(material: Material, key: str) -> list[Prediction]:
    wanted = (each for each in material.findings.predictions if without_servers(each.setting) == key)
    return [each for each in wanted if each.row == "ring" or each.row.startswith("hub-")]


def _servers(material: Material, found: Iterable[Prediction]) -> list[int]:
    hubs = (each for each in found if each.row != "ring")
    return sorted({n for each in hubs if (n := material.findings.setting(each.setting).get("servers"))})


def _by_servers(material: Material, index: int, key: str) -> Html:
    found, name = _of(material, key), f"scaling-servers-{index}"
    servers = _servers(material, found)
    times = [value for each in found for value in (each.measured_ms, each.predicted_ms) if value is not None]
    rows = list(dict.fromkeys(each.row for each in found if each.measured_ms or each.predicted_ms))
    drawn = list(chain.from_iterable(_times(material, row, found, servers) for row in rows))
    x = Axis(Log.of(servers), "servers, log scale")
    y = Axis(Linear.around(times, zero=True), "ms a step")
    crossing = next(
        (each for each in material.findings.crossover if without_servers(each.setting) == key), None
    )
    rules = _rules(crossing, x)
    heads = (Column("row"), Column("servers"), Column("measured ms"), Column("predicted ms"))
    settings = {each.setting for each in found}
    title = f"Step time by servers: {words(material.findings.setting(found[0].setting), key, servers=False)}"
    told = table(title, heads, _server_lines(material, found))
    drawing, key_ = lines(name, drawn, x, y, rules), material.key(rows, settings)
    return figure(name, title, _crossing(crossing), drawing, told, key_)


def _times(material: Material, row: str, found: Sequence[Prediction], servers: Sequence[int]) -> list[Line]:
    """A ring has no servers: its time is the same for all numbers of them."""
    mine = [each for each in found if each.row == row]
    settings = {each.setting for each in mine}
    label, mark = material.name_under(row, settings), material.marks[row]
    if row == "ring":
        each = mine[0]
        across = _both(mark, label, ((n, each.measured_ms, each.predicted_ms) for n in servers))
        return [across[0], Line(mark, label, across[1].spots)]
    by = [(material.findings.setting(each.setting).get("servers", 1), each) for each in mine]
    return _both(mark, label, sorted((n, each.measured_ms, each.predicted_ms) for n, each in by))


def _server_lines(material: Material, found: Iterable[Prediction]) -> Iterable[list[str | Html]]:
    for each in found:
        servers = material.findings.setting(each.setting).get("servers", NOTHING)
        told = "any" if each.row == "ring" else str(servers)
        yield [
            material.name_under(each.row, [each.setting]),
            told,
            _number(each.measured_ms),
            _number(each.predicted_ms),
        ]


def _rules(crossing: Crossover | None, x: Axis) -> list[Html]:
    known = {} if crossing is None else {"measured": crossing.measured, "predicted": crossing.predicted}
    there = [(word, at) for word, at in known.items() if at is not None and 0 <= x.scale.place(at) <= 1]
    return [upright(at, x, f"crossover {word}", row) for row, (word, at) in enumerate(there)]


def _crossing(crossing: Crossover | None) -> str:
    if crossing is None:
        return "No crossover was looked for."
    known = {"measured": crossing.measured, "predicted": crossing.predicted}
    told = [f"{word} {'nowhere' if at is None else f'from {at:g} servers on'}" for word, at in known.items()]
    rule = f", by the rule {crossing.formula}" if crossing.formula else ""
    return f"The hub overtakes the ring: {', '.join(told)}{rule}."


def _crossings(found: Iterable[Crossover]) -> Html | None:
    """Those that no drawing shows."""
    items = [element("li", element("b", each.setting), ": ", _crossing(each)) for each in found]
    return element("ul", *items) if items else None

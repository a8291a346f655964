"""Scaling: throughput with more workers, step time by servers, and predictions beside the measurements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from hubring.ps.page.kit.chart import Axis, LinearScale, LogScale, path
from hubring.ps.page.kit.figures import NOTHING, digits, percent, signed
from hubring.workers.compare.decide.verdict import crossing
from hubring.workers.compare.findings import Crossover, Prediction, Scaling
from hubring.workers.compare.plan.row import meets
from hubring.workers.compare.plan.setting import Setting, without_servers, words
from hubring.workers.compare.predict.prediction import SCORED
from hubring.workers.compare.show.material import (
    DrawnFigure,
    Lines,
    NumberTable,
    PageContent,
    RowLine,
    Rule,
    Spot,
    measured_and_predicted,
)

ServerTimes = dict[int, tuple[float | None, float | None]]
"""Step times of one row in ms, by servers: (measured, predicted), None where missing."""


def _keys(material: PageContent) -> list[str]:
    """Returns settings, without servers, in which hub rows ran with several numbers of servers."""
    keys = dict.fromkeys(map(without_servers, material.findings.setting_keys))
    return [key for key in keys if any(len(by) > 1 for by in _times(material, key).values())]


def _times(material: PageContent, key: str) -> dict[str, ServerTimes]:
    """Returns the times of the ring and of every hub row. A row that ignores servers has one time for all."""
    findings, found = material.findings, defaultdict[str, ServerTimes](dict)
    known = {each: findings.setting(each).servers for each in findings.setting_keys}
    servers = {each: number for each, number in known.items() if without_servers(each) == key}
    predicted = {(each.setting, each.row): each.predicted_ms for each in findings.predictions}
    for entry in sorted(findings.rows, key=lambda entry: known[entry.setting]):
        if entry.setting in servers and (entry.row == "ring" or entry.row.startswith("hub-")):
            both = entry.median("step_ms"), predicted.get((entry.setting, entry.row))
            found[entry.row][servers[entry.setting]] = both
    shown = {row: found[row] for row in findings.row_names if any(_known(found[row]))}
    return {
        row: dict.fromkeys(sorted(servers.values()), next(iter(by.values()))) if _fixed(row) else by
        for row, by in shown.items()
    }


def _known(times: ServerTimes) -> list[float]:
    return [value for both in times.values() for value in both if value is not None]


def _fixed(row: str) -> bool:
    """Whether a row ignores the number of servers, as a ring and a colocated hub do."""
    return meets(row, Setting(workers=2, servers=2)).servers != 2


def _crossing_figure(material: PageContent, index: int, key: str) -> DrawnFigure:
    name, found = f"scaling-servers-{index}", _times(material, key)
    x = Axis(LogScale.of(n for by in found.values() for n in by), "servers, log scale")
    times = chain.from_iterable(map(_known, found.values()))
    y = Axis(LinearScale.around(times, zero=True), "ms per step")
    keys = [each for each in material.findings.setting_keys if without_servers(each) == key]
    title = f"Step time by servers: {words(material.findings.setting(keys[0]), servers=False)}"
    found_at = next((each for each in material.findings.crossover if each.setting == key), None)
    drawn = [line for each in found.items() for line in _crossing_lines(material, *each, keys)]
    heads = ("row", "servers", "measured ms", "predicted ms")
    table = NumberTable(title, heads, list(_cells(material, found, keys)))
    drawing = Lines(drawn, x, y, [] if found_at is None else _rules(found_at, x))
    shown = material.key(found, keys)
    caption = "The crossover was not determined." if found_at is None else _caption_of(found_at)
    return DrawnFigure(name, title, caption, drawing, table, shown)


def _crossing_lines(
    material: PageContent, row: str, times: ServerTimes, keys: Sequence[str]
) -> list[RowLine]:
    label, mark = material.name_under(row, keys), material.marks[row]
    both = measured_and_predicted(mark, label, ((n, *pair) for n, pair in times.items()))
    return [both[0], RowLine(mark, label, both[1].spots)] if _fixed(row) else both


def _cells(
    material: PageContent, found: Mapping[str, ServerTimes], keys: Sequence[str]
) -> Iterable[Sequence[str]]:
    for row, by in found.items():
        for servers, both in {"any": next(iter(by.values()))}.items() if _fixed(row) else by.items():
            yield [material.name_under(row, keys), str(servers), *map(_number, both)]


def _rules(found: Crossover, x: Axis) -> list[Rule]:
    known = {"measured": found.measured, "predicted": found.predicted if found.calibrated else None}
    there = [(word, at) for word, at in known.items() if at is not None and 0 <= x.scale.place(at) <= 1]
    return [Rule(at, f"crossover {word}", True, row) for row, (word, at) in enumerate(there)]


def _caption_of(found: Crossover) -> str:
    sentence = crossing(found)
    return f"{sentence[0].upper()}{sentence[1:]}"


def scaling(material: PageContent) -> dict[str, Any] | None:
    """Returns throughput by workers, step time by servers, and where hub and ring cross."""
    workers = [_by_workers(material)] if material.findings.scaling else []
    drawn, found = _keys(material), material.findings.crossover
    figures = [*workers, *(_crossing_figure(material, index, key) for index, key in enumerate(drawn))]
    crossings = [(each.setting, _caption_of(each)) for each in found if each.setting not in drawn]
    if not figures and not crossings:
        return None
    return {"title": "Scaling with workers and servers", "figures": figures, "crossings": crossings}


def _by_workers(material: PageContent) -> DrawnFigure:
    rows = material.findings.scaling
    x = Axis(LogScale.of(size for row in rows for size in row.workers), "workers, log scale")
    drawn = list(chain.from_iterable(_pair(material, row) for row in rows))
    # Throughput per worker: constant if scaling is perfect, so that losses are visible.
    shares = (spot.y for line in drawn for spot in line.spots)
    y = Axis(LinearScale.around(shares, zero=True), f"{material.job.samples}/s per worker")
    heads = ("row", "workers", "measured", "predicted", "off by")
    table = NumberTable(
        f"{material.job.samples.capitalize()}/s by workers", heads, list(_lines(material, rows))
    )
    name, key = "scaling-workers", material.key(row.row for row in rows)
    rules = [Rule(at, f"{row} overtakes", True, place) for place, (row, at) in enumerate(overtaking(rows))]
    title = "Throughput per worker, by number of workers"
    return DrawnFigure(name, title, _caption(rows), Lines(drawn, x, y, rules), table, key)


def overtaking(rows: Sequence[Scaling]) -> list[tuple[str, int]]:
    """Returns hub rows with the number of workers from which they are predicted to beat the ring."""
    speeds = {row.row: dict(zip(row.workers, row.predicted, strict=True)) for row in rows}
    ring = {n: v for n, v in speeds.pop("ring", {}).items() if v is not None}
    found = []
    for row, mine in speeds.items():
        behind = [n for n, v in ring.items() if (mine.get(n) or 0.0) <= v]
        ahead = [n for n in ring if n > max(behind, default=0)]
        found += [(row, min(ahead))] if row.startswith("hub-") and behind and ahead else []
    return found


def _pair(material: PageContent, row: Scaling) -> list[RowLine]:
    """Returns measurements as symbols and predictions as a thin line."""
    mark, label = material.marks[row.row], material.name_under(row.row)
    points = zip(row.workers, row.measured, row.predicted, strict=True)
    shares = ((n, real and real / n, thought and thought / n) for n, real, thought in points)
    return measured_and_predicted(mark, label, shares)


def _caption(rows: Sequence[Scaling]) -> str:
    known = [(row, [n for n, value in zip(row.workers, row.measured, strict=True) if value]) for row in rows]
    texts = [f"{row.row} measured with up to {max(sizes)} workers" for row, sizes in known if sizes]
    far = max(size for row in rows for size in row.workers)
    ahead = [
        f" {row} is predicted to overtake the ring with {at:,} or more workers."
        for row, at in overtaking(rows)
    ]
    return f"{'; '.join(texts) or 'Nothing was measured'}; predicted up to {far:,}.{''.join(ahead)}"


def _lines(material: PageContent, rows: Iterable[Scaling]) -> Iterable[list[str]]:
    for row in rows:
        for size, real, thought in zip(row.workers, row.measured, row.predicted, strict=True):
            off = NOTHING if real is None or thought is None else signed(thought / real - 1)
            yield [material.name_under(row.row), f"{size:,}", _number(real), _number(thought), off]


def _number(value: float | None) -> str:
    return NOTHING if value is None else digits(value)


FAIR = 0.15
"""Acceptable error, drawn as a band."""

HEADS = ("row", "setting", "measured ms", "predicted ms", "error", "by", "calibrated on")
WORDS = ("setting", "by", "calibrated on")


def predictions(material: PageContent) -> dict[str, Any] | None:
    """Returns every measured step with its prediction, as a drawing and as a table."""
    found = material.findings.predictions
    if not found:
        return None
    lines = [_line(material, each) for each in found]
    table = NumberTable("Predicted and measured step times", HEADS, lines, WORDS)
    # A setting that calibrated its row does not show how good the predictions are.
    both = [each for each in found if each.measured_ms and each.predicted_ms and not each.calibrated]
    figure = _prediction_figure(material, both, table) if both else None
    title = "How good were the predictions?"
    return {"title": title, "score": material.findings.score, "table": table, "figure": figure}


def _prediction_figure(material: PageContent, both: Sequence[Prediction], table: NumberTable) -> DrawnFigure:
    times = [value for each in both for value in (each.measured_ms, each.predicted_ms) if value]
    scale = LogScale.around([min(times) * (1 - FAIR), max(times) * (1 + FAIR)])
    x, y = Axis(scale, "measured ms, log scale"), Axis(scale, "predicted ms, log scale")
    rows = list(dict.fromkeys(each.row for each in both))
    drawn = [_spots(material, row, both) for row in rows]
    caption = (
        f"On the line, prediction and measurement are equal; in the band, at most {percent(FAIR)} apart."
    )
    within = sum(abs(each.error or 0.0) <= FAIR for each in both)
    worst = max(both, key=lambda each: abs(each.error or 0.0))
    caption += (
        f" {within} of {len(both)} are in the band; the worst is {worst.row} with {worst.setting}, off by"
        f" {signed(worst.error or 0.0)}."
    )
    drawing = Lines(drawn, x, y, fair=_fair(scale), height=300)
    title, key = "Predicted against measured step time", material.key(rows)
    return DrawnFigure("predictions-chart", title, caption, drawing, table, key, opened=True)


def _spots(material: PageContent, row: str, both: Iterable[Prediction]) -> RowLine:
    mine = (each for each in both if each.row == row)
    spots = [Spot.at(each.measured_ms or 0.0, each.predicted_ms or 0.0) for each in mine]
    return RowLine(material.marks[row], "", spots, symbols=True, joined=False)


def _fair(scale: LogScale) -> tuple[str, str]:
    """Returns the band of acceptable errors, and the line of equality."""
    place, ticks = scale.place, scale.ticks()
    ends = (ticks[0] / 100, ticks[-1] * 100)
    above = [(place(at), place(at * (1 + FAIR))) for at in ends]
    below = [(place(at), place(at * (1 - FAIR))) for at in reversed(ends)]
    return path([*above, *below], close=True), path((place(at), place(at)) for at in ends)


def _line(material: PageContent, each: Prediction) -> list[str]:
    return [
        material.name_under(each.row, [each.setting]),
        each.setting,
        _number(each.measured_ms),
        _number(each.predicted_ms) + ("" if each.row in SCORED else " (not scored)"),
        NOTHING if each.error is None or each.calibrated else signed(each.error),
        each.by,
        "yes, so it does not count" if each.calibrated else "no",
    ]

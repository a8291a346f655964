"""Scaling: throughput with more workers, step time by servers, and predictions beside the measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from msgspec import Struct

from hubring.ps.page.kit.chart import Axis, LinearScale, LogScale, path
from hubring.ps.page.kit.figures import NOTHING, digits, percent, signed
from hubring.workers.compare.decide.verdict import crossing
from hubring.workers.compare.findings import Crossover, Prediction, Scaling
from hubring.workers.compare.plan.row import meets
from hubring.workers.compare.plan.setting import Setting, without_servers, words
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


class ServerTimes(Struct, frozen=True):
    """Step times of one row in ms, by servers: (measured, predicted), None where missing."""

    row: str
    by: dict[int, tuple[float | None, float | None]]

    @property
    def known(self) -> list[float]:
        return [value for both in self.by.values() for value in both if value is not None]


def _keys(material: PageContent) -> list[str]:
    """Returns settings, without servers, in which hub rows ran with several numbers of servers."""
    keys = dict.fromkeys(map(without_servers, material.findings.setting_keys))
    return [key for key in keys if any(len(each.by) > 1 for each in _times(material, key))]


def _times(material: PageContent, key: str) -> list[ServerTimes]:
    """Returns the times of the ring and of every hub row. A row that ignores servers has one time for all."""
    findings = material.findings
    keys = [each for each in findings.setting_keys if without_servers(each) == key]
    servers = sorted({findings.setting(each).servers for each in keys})
    rows = [row for row in findings.row_names if row == "ring" or row.startswith("hub-")]
    known = [each for row in rows if (each := ServerTimes(row, _of(material, row, keys))).known]
    return [_across(each, servers) if _fixed(each.row) else each for each in known]


def _fixed(row: str) -> bool:
    """Whether a row ignores the number of servers, as a ring and a colocated hub do."""
    return meets(row, Setting(workers=2, servers=2)).servers != 2


def _across(times: ServerTimes, servers: Sequence[int]) -> ServerTimes:
    return ServerTimes(times.row, dict.fromkeys(servers, next(iter(times.by.values()))))


def _of(material: PageContent, row: str, keys: Sequence[str]) -> dict[int, tuple[float | None, float | None]]:
    """Returns what was measured and predicted for a row in these settings."""
    findings, found = material.findings, {}
    predicted = {each.setting: each.predicted_ms for each in findings.predictions if each.row == row}
    for entry in findings.rows:
        if entry.row == row and entry.setting in keys:
            both = entry.median("step_ms"), predicted.get(entry.setting)
            found[findings.setting(entry.setting).servers] = both
    return dict(sorted(found.items()))


def _crossing_figure(material: PageContent, index: int, key: str) -> DrawnFigure:
    name, found = f"scaling-servers-{index}", _times(material, key)
    x = Axis(LogScale.of(n for each in found for n in each.by), "servers, log scale")
    y = Axis(LinearScale.around((value for each in found for value in each.known), zero=True), "ms per step")
    keys = [each for each in material.findings.setting_keys if without_servers(each) == key]
    title = f"Step time by servers: {words(material.findings.setting(keys[0]), servers=False)}"
    found_at = next((each for each in material.findings.crossover if each.setting == key), None)
    drawn = list(chain.from_iterable(_crossing_lines(material, each, keys) for each in found))
    heads = ("row", "servers", "measured ms", "predicted ms")
    table = NumberTable(title, heads, list(_cells(material, found, keys)))
    drawing = Lines(drawn, x, y, [] if found_at is None else _rules(found_at, x))
    shown = material.key([each.row for each in found], keys)
    caption = "The crossover was not determined." if found_at is None else _caption_of(found_at)
    return DrawnFigure(name, title, caption, drawing, table, shown)


def _crossing_lines(material: PageContent, times: ServerTimes, keys: Sequence[str]) -> list[RowLine]:
    label, mark = material.name_under(times.row, keys), material.marks[times.row]
    both = measured_and_predicted(mark, label, ((n, *pair) for n, pair in times.by.items()))
    return [both[0], RowLine(mark, label, both[1].spots)] if _fixed(times.row) else both


def _cells(
    material: PageContent, found: Iterable[ServerTimes], keys: Sequence[str]
) -> Iterable[Sequence[str]]:
    for each in found:
        by = {"any": next(iter(each.by.values()))} if _fixed(each.row) else each.by
        for servers, both in by.items():
            yield [material.name_under(each.row, keys), str(servers), *map(_number, both)]


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
    y = Axis(LinearScale.around(_shares(rows), zero=True), f"{material.job.samples}/s per worker")
    drawn = list(chain.from_iterable(_pair(material, row) for row in rows))
    heads = ("row", "workers", "measured", "predicted", "off by")
    table = NumberTable(
        f"{material.job.samples.capitalize()}/s by workers", heads, list(_lines(material, rows))
    )
    name, key = "scaling-workers", material.key(row.row for row in rows)
    rules = [Rule(at, f"{row} overtakes", True, place) for place, (row, at) in enumerate(overtaking(rows))]
    title = "Throughput per worker, by number of workers"
    return DrawnFigure(name, title, _caption(rows), Lines(drawn, x, y, rules), table, key)


def _shares(rows: Iterable[Scaling]) -> list[float]:
    """Returns throughput per worker: constant if scaling is perfect, so that losses are visible."""
    both = ((row.workers, values) for row in rows for values in (row.measured, row.predicted))
    return [v / n for sizes, values in both for n, v in zip(sizes, values, strict=True) if v is not None]


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
    both = [each for each in found if each.measured_ms and each.predicted_ms]
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
    foreseen = [each for each in both if not each.calibrated]
    if foreseen:
        within = sum(abs(each.error or 0.0) <= FAIR for each in foreseen)
        worst = max(foreseen, key=lambda each: abs(each.error or 0.0))
        caption += (
            f" {within} of {len(foreseen)} without calibration are in the band; the worst is {worst.row} with"
            f" {worst.setting}, off by {signed(worst.error or 0.0)}."
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
        _number(each.predicted_ms),
        NOTHING if each.error is None else signed(each.error),
        each.by,
        "yes" if each.calibrated else "no",
    ]

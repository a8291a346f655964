"""The crossing: step time by servers, and the number from which the hub is faster than the ring."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from hubring.ps.page.kit.chart import Axis
from hubring.ps.page.kit.figures import NOTHING, digits
from hubring.ps.page.kit.scale import Linear, Log
from hubring.workers.compare.experiment.row import meets
from hubring.workers.compare.experiment.setting import Setting
from hubring.workers.compare.page.figure import Figure, Table
from hubring.workers.compare.page.lines import Line, Lines, Rule, measured_and_predicted
from hubring.workers.compare.page.material import Material
from hubring.workers.compare.result.findings import Crossover
from hubring.workers.compare.result.setting_text import not_decided, with_servers, without_servers, words


@dataclass(frozen=True, slots=True)
class Times:
    """Step times of one row in ms, by servers: (measured, predicted), None where missing."""

    row: str
    by: dict[int, tuple[float | None, float | None]]

    @property
    def known(self) -> list[float]:
        return [value for both in self.by.values() for value in both if value is not None]


def by_servers(material: Material) -> list[Figure]:
    """Returns a drawing for every setting that ran with several numbers of servers."""
    return [_figure(material, index, key) for index, key in enumerate(_keys(material))]


def undrawn(material: Material) -> list[tuple[str, str]]:
    """Returns the crossings that no drawing shows: the setting and a sentence."""
    keys = _keys(material)
    found = material.findings.crossover
    return [(each.setting, _caption(each)) for each in found if each.setting not in keys]


def _keys(material: Material) -> list[str]:
    """Returns settings, without servers, in which hub rows ran with several numbers of servers."""
    keys = dict.fromkeys(map(without_servers, material.findings.setting_keys))
    return [key for key in keys if any(len(each.by) > 1 for each in _times(material, key))]


def _times(material: Material, key: str) -> list[Times]:
    """Returns the times of the ring and of every hub row. A row that ignores servers has one time for all."""
    findings = material.findings
    keys = [each for each in findings.setting_keys if without_servers(each) == key]
    servers = sorted({n for each in keys if (n := findings.setting(each).get("servers"))})
    rows = [row for row in findings.row_names if row == "ring" or row.startswith("hub-")]
    known = [each for row in rows if (each := Times(row, _of(material, row, keys))).known]
    return [_across(each, servers) if _fixed(each.row) else each for each in known]


def _fixed(row: str) -> bool:
    """Whether a row ignores the number of servers, as a ring and a colocated hub do."""
    return meets(row, Setting(workers=2, servers=2)).servers != 2


def _across(times: Times, servers: Sequence[int]) -> Times:
    return Times(times.row, dict.fromkeys(servers, next(iter(times.by.values()))))


def _of(material: Material, row: str, keys: Sequence[str]) -> dict[int, tuple[float | None, float | None]]:
    """Returns what was measured and predicted for a row in these settings."""
    findings, found = material.findings, {}
    predicted = {each.setting: each.predicted_ms for each in findings.predictions if each.row == row}
    for entry in findings.rows:
        servers = findings.setting(entry.setting).get("servers")
        if entry.row == row and entry.setting in keys and servers:
            found[servers] = (entry.median("step_ms"), predicted.get(entry.setting))
    return dict(sorted(found.items()))


def _figure(material: Material, index: int, key: str) -> Figure:
    name, found = f"scaling-servers-{index}", _times(material, key)
    x = Axis(Log.of(n for each in found for n in each.by), "servers, log scale")
    y = Axis(Linear.around((value for each in found for value in each.known), zero=True), "ms per step")
    keys = [each for each in material.findings.setting_keys if without_servers(each) == key]
    title = f"Step time by servers: {words(material.findings.setting(keys[0]), key, servers=False)}"
    crossing = next((each for each in material.findings.crossover if each.setting == key), None)
    drawn = list(chain.from_iterable(_lines(material, each, keys) for each in found))
    heads = ("row", "servers", "measured ms", "predicted ms")
    table = Table(title, heads, list(_cells(material, found, keys)))
    drawing = Lines(drawn, x, y, _rules(crossing, x))
    shown = material.key([each.row for each in found], keys)
    return Figure(name, title, _caption(crossing), drawing, table, shown)


def _lines(material: Material, times: Times, keys: Sequence[str]) -> list[Line]:
    label, mark = material.name_under(times.row, keys), material.marks[times.row]
    both = measured_and_predicted(mark, label, ((n, *pair) for n, pair in times.by.items()))
    return [both[0], Line(mark, label, both[1].spots)] if _fixed(times.row) else both


def _cells(material: Material, found: Iterable[Times], keys: Sequence[str]) -> Iterable[Sequence[str]]:
    for each in found:
        by = {"any": next(iter(each.by.values()))} if _fixed(each.row) else each.by
        for servers, both in by.items():
            times = (NOTHING if value is None else digits(value) for value in both)
            yield [material.name_under(each.row, keys), str(servers), *times]


def _rules(crossing: Crossover | None, x: Axis) -> list[Rule]:
    there = [
        (word, at) for word, at in _known(crossing).items() if at is not None and 0 <= x.scale.place(at) <= 1
    ]
    return [Rule(at, f"crossover {word}", True, row) for row, (word, at) in enumerate(there)]


def _caption(crossing: Crossover | None) -> str:
    if crossing is None:
        return "The crossover was not determined."
    known, undecided = _known(crossing), crossing.undecided
    if undecided and crossing.measured is None:
        del known["measured"]
    texts = [f"{with_servers(at)} ({word})" for word, at in known.items()]
    texts.append(f"{with_servers(crossing.by_bytes)} (by bytes alone, {crossing.formula})")
    found = f"The hub is faster than the ring {', '.join(texts)}."
    return f"{found} The measurement is {not_decided(undecided)}." if undecided else found


def _known(crossing: Crossover | None) -> dict[str, float | None]:
    """Returns the crossing by source: measured, predicted."""
    if crossing is None:
        return {}
    known = {"measured": crossing.measured}
    return known | ({"predicted": crossing.predicted} if crossing.calibrated else {})

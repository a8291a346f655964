"""Predictions of the cost model and the measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hubring.ps.page.kit.chart import Axis, path
from hubring.ps.page.kit.figures import NOTHING, digits, percent, signed
from hubring.ps.page.kit.scale import Log
from hubring.workers.compare.page.figure import Figure, Table
from hubring.workers.compare.page.lines import Line, Lines, Spot
from hubring.workers.compare.page.material import Material
from hubring.workers.compare.result.findings import Prediction

FAIR = 0.15
"""Acceptable error, drawn as a band."""

HEADS = ("row", "setting", "measured ms", "predicted ms", "error", "by", "calibrated on")
WORDS = ("setting", "by", "calibrated on")


def predictions(material: Material) -> dict[str, Any] | None:
    """Returns every measured step with its prediction, as a drawing and as a table."""
    found = material.findings.predictions
    if not found:
        return None
    lines = [_line(material, each) for each in found]
    table = Table("Predicted and measured step times", HEADS, lines, WORDS)
    both = [each for each in found if each.measured_ms and each.predicted_ms]
    figure = _figure(material, both, table) if both else None
    title = "How good were the predictions?"
    return {"title": title, "score": material.findings.score, "table": table, "figure": figure}


def _figure(material: Material, both: Sequence[Prediction], table: Table) -> Figure:
    times = [value for each in both for value in (each.measured_ms, each.predicted_ms) if value]
    scale = Log.around([min(times) * (1 - FAIR), max(times) * (1 + FAIR)])
    x, y = Axis(scale, "measured ms, log scale"), Axis(scale, "predicted ms, log scale")
    rows = list(dict.fromkeys(each.row for each in both))
    drawn = [_spots(material, row, both) for row in rows]
    caption = (
        f"On the line, prediction and measurement are equal; in the band, at most {percent(FAIR)} apart."
    )
    foreseen = [each for each in both if not each.calibrated]
    if foreseen:
        within = sum(abs(_error(each)) <= FAIR for each in foreseen)
        caption += f" {within} of {len(foreseen)} without calibration are in the band; {_worst(foreseen)}."
    drawing = Lines(drawn, x, y, fair=_fair(scale), height=300)
    title, key = "Predicted against measured step time", material.key(rows)
    return Figure("predictions-chart", title, caption, drawing, table, key, opened=True)


def _spots(material: Material, row: str, both: Iterable[Prediction]) -> Line:
    mine = (each for each in both if each.row == row)
    spots = [Spot.at(each.measured_ms or 0.0, each.predicted_ms or 0.0) for each in mine]
    return Line(material.marks[row], "", spots, symbols=True, joined=False)


def _fair(scale: Log) -> tuple[str, str]:
    """Returns the band of acceptable errors, and the line of equality."""
    place, ticks = scale.place, scale.ticks()
    ends = (ticks[0] / 100, ticks[-1] * 100)
    above = [(place(at), place(at * (1 + FAIR))) for at in ends]
    below = [(place(at), place(at * (1 - FAIR))) for at in reversed(ends)]
    return path([*above, *below], close=True), path((place(at), place(at)) for at in ends)


def _error(each: Prediction) -> float:
    assert each.measured_ms
    assert each.predicted_ms
    return each.predicted_ms / each.measured_ms - 1


def _worst(both: Sequence[Prediction]) -> str:
    worst = max(both, key=lambda each: abs(_error(each)))
    return f"the worst is {worst.row} with {worst.setting}, off by {signed(_error(worst))}"


def _line(material: Material, each: Prediction) -> list[str]:
    times = [NOTHING if value is None else digits(value) for value in (each.measured_ms, each.predicted_ms)]
    error = NOTHING if each.error is None else signed(each.error)
    return [
        material.name_under(each.row, [each.setting]),
        each.setting,
        *times,
        error,
        each.by,
        "yes" if each.calibrated else "no",
    ]

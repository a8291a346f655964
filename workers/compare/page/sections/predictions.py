"""Predictions beside measurements: how far the model of cost can be believed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hubring.ps.markup import Html, element
from hubring.workers.compare.figures import NOTHING, digits, percent, signed
from hubring.workers.compare.findings import Prediction
from hubring.workers.compare.page.chart import Axis, Column, figure, path, stretched, table
from hubring.workers.compare.page.chart_lines import Line, Spot, lines
from hubring.workers.compare.page.material import Material, section
from hubring.workers.compare.page.scale import Log

FAIR = 0.15
"""The error that is hoped for; drawn as a band."""

COLUMNS = (
    Column("row"),
    Column("setting", words=True),
    Column("measured ms"),
    Column("predicted ms"),
    Column("error"),
    Column("by", words=True),
    Column("calibrated on", words=True),
)


def predictions(material: Material) -> Html | None:
    """Every measured step beside the predicted one, as a drawing and as a table."""
    found = material.findings.predictions
    if not found:
        return None
    told = table("Predicted and measured step times", COLUMNS, [_line(material, each) for each in found])
    both = [each for each in found if each.measured_ms and each.predicted_ms]
    drawn = _figure(material, both, told) if both else told
    return section("predictions", "Did the model see it coming?", _lead(material), drawn)


def _lead(material: Material) -> str:
    score = material.findings.score
    if score is None:
        return (
            "No setting was both measured and left out of the calibration, so the predictions have no score."
        )
    return (
        f"The mean error over {score.settings} settings that were not calibrated on is"
        f" {percent(score.mean_error)}. Every step time was predicted from the constants of this machine, by"
        " a formula where one holds and by simulation where none does."
    )


def _figure(material: Material, both: Sequence[Prediction], told: Html) -> Html:
    name = "predictions-chart"
    times = [value for each in both for value in (each.measured_ms, each.predicted_ms) if value]
    scale = Log.around([min(times) * (1 - FAIR), max(times) * (1 + FAIR)])
    x, y = Axis(scale, "measured ms, log scale"), Axis(scale, "predicted ms, log scale")
    rows = list(dict.fromkeys(each.row for each in both))
    drawn = [_spots(material, row, both) for row in rows]
    says = (
        f"On the line, prediction and measurement are the same; in the band, {percent(FAIR)} apart at most."
    )
    foreseen = [each for each in both if not each.calibrated]
    if foreseen:
        within = sum(abs(_error(each)) <= FAIR for each in foreseen)
        says += f" Of {len(foreseen)} not calibrated on {within} are in the band, {_worst(foreseen)}."
    drawing = lines(name, drawn, x, y, [_band(x, y)], height=300)
    title = "Predicted against measured step time"
    return figure(name, title, says, drawing, told, material.key(rows), opened=True)


def _spots(material: Material, row: str, both: Iterable[Prediction]) -> Line:
    mine = (each for each in both if each.row == row)
    spots = [Spot.at(each.measured_ms or 0.0, each.predicted_ms or 0.0) for each in mine]
    return Line(material.marks[row], "", spots, symbols=True, joined=False)


def _band(x: Axis, y: Axis) -> Html:
    """The line of equality, with what is hoped for on both sides."""
    low, high = x.scale.place, y.scale.place
    ends = (x.scale.ticks()[0] / 100, x.scale.ticks()[-1] * 100)
    sides = [
        (low(at), high(at * factor))
        for factor, order in ((1 + FAIR, 1), (1 - FAIR, -1))
        for at in ends[::order]
    ]
    band = element("path", d=path(sides, close=True), class_="fair")
    equal = element("path", d=path([(low(at), high(at)) for at in ends]), class_="equal")
    return element("g", stretched(band, equal), class_="clipped")


def _error(each: Prediction) -> float:
    assert each.measured_ms
    assert each.predicted_ms
    return each.predicted_ms / each.measured_ms - 1


def _worst(both: Sequence[Prediction]) -> str:
    worst = max(both, key=lambda each: abs(_error(each)))
    return f"the worst is {worst.row} under {worst.setting}, off by {signed(_error(worst))}"


def _line(material: Material, each: Prediction) -> list[str | Html]:
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

"""The table: one line a row, as text for a terminal or a page."""

from __future__ import annotations

from collections.abc import Sequence

from workers.compare.job import Job
from workers.compare.measure import Measure

NOTHING = "-"

FOOTNOTES = (
    "local is one process with the whole batch.",
    "Samples per second are means, step times medians, after warm-up; every row ran once.",
    "Bytes of the ring are computed, 2(n-1)/n of the model sent and as much received; the hub's are counted.",
    "Exposed: the part of the exchange that a step waited for, hidden behind no computation.",
    "Staleness: updates by others between a worker's read and its own update.",
)


def columns(job: Job, target: float) -> list[str]:
    """The heads of the columns."""
    return [
        "row",
        f"{job.samples}/s",
        "step ms",
        f"s to {target:g}",
        "test loss",
        job.title,
        "bytes a step",
        "exposed ms",
        "stale mean/max",
    ]


def cells(measure: Measure) -> list[str]:
    """A row's cells, in the order of `columns`; a speed that may not be shown reads `withheld`."""
    return [
        measure.row,
        _speed(measure, measure.samples_per_second, ",.0f"),
        _speed(measure, measure.step_ms, ".2f"),
        _speed(measure, measure.seconds_to_target, ".2f"),
        f"{measure.final_loss:.4f}",
        f"{measure.final_metric:.3f}",
        _bytes(measure.bytes_per_step),
        _speed(measure, measure.exposed_ms_per_step, ".2f"),
        f"{measure.staleness_mean:.2f}/{measure.staleness_max}" if measure.on_hub else NOTHING,
    ]


def reasons(measures: Sequence[Measure]) -> list[str]:
    """Why speeds are withheld, to be read below the table."""
    return [f"{measure.row}: withheld, {measure.withheld}" for measure in measures if measure.withheld]


def _speed(measure: Measure, value: float | None, form: str) -> str:
    if measure.withheld:
        return "withheld"
    return NOTHING if value is None else format(value, form)


def _bytes(count: float) -> str:
    if count == 0:
        return NOTHING
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"

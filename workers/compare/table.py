"""The table: one line for a row of a setting, as text for a terminal or a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NOTHING = "-"

FOOTNOTES = (
    "local is one process with the whole batch.",
    "Medians over seeds; ± is half of the interval that holds the median in 95 of 100 cases, by bootstrap.",
    "Samples per second are means, step times medians, after warm-up.",
    "Bytes are sent and received; the ring's are computed, 2(n-1)/n of the model each, the hub's counted.",
    "Exposed: the part of the exchange that a step waited for, hidden behind no computation.",
    "Staleness: updates by others between a worker's read and its own update.",
)

Results = Mapping[str, Any]
Entry = Mapping[str, Any]


def columns(results: Results) -> list[str]:
    """The heads of the columns."""
    job = results["job"]
    goal = NOTHING if job["target"] is None else f"{job['target']:g}"
    return [
        *(["setting"] if len(results["settings"]) > 1 else []),
        "row",
        f"{job['samples']}/s",
        "step ms",
        f"s to {goal}",
        "final loss",
        job["title"],
        "bytes a step",
        "exposed ms",
        "stale mean/max",
    ]


def lines(results: Results) -> list[list[str]]:
    """A row's cells, in the order of `columns`; a speed that may not be shown reads `withheld`."""
    several = len(results["settings"]) > 1
    return [[*([row["setting"]] if several else []), *_cells(row)] for row in results["rows"]]


def reasons(results: Results) -> list[str]:
    """Why speeds are withheld, to be read below the table."""
    several = len(results["settings"]) > 1
    return [
        f"{row['setting'] + ' ' if several else ''}{row['row']}: withheld, {row['withheld']}"
        for row in results["rows"]
        if row["withheld"]
    ]


def _cells(row: Entry) -> list[str]:
    numbers = row["numbers"]
    return [
        row["row"],
        _speed(row, "samples_per_second", ",.0f"),
        _speed(row, "step_ms", ".2f"),
        _speed(row, "seconds_to_target", ".2f"),
        _number(numbers["final_loss"], ".4f"),
        _number(numbers["final_metric"], ".3f"),
        _bytes(_sum(numbers, ("bytes_sent_per_step", "bytes_received_per_step"))),
        _speed(row, "exposed_ms", ".2f"),
        _stale(numbers),
    ]


def _speed(row: Entry, name: str, form: str) -> str:
    if row["withheld"]:
        return "withheld"
    return _number(row["numbers"][name], form)


def _number(number: Entry | None, form: str) -> str:
    """A median with its interval, and how many seeds have one if not all do."""
    if number is None:
        return NOTHING
    half = (number["high"] - number["low"]) / 2 / abs(number["median"] or 1.0)
    spread = f" ±{half:.0%}" if half >= 0.005 else ""
    known = sum(value is not None for value in number["values"])
    some = f" ({known} of {len(number['values'])})" if known < len(number["values"]) else ""
    return f"{number['median']:{form}}{spread}{some}"


def _sum(numbers: Mapping[str, Entry | None], names: Sequence[str]) -> float:
    return sum(float(number["median"]) for name in names if (number := numbers[name]) is not None)


def _stale(numbers: Mapping[str, Entry | None]) -> str:
    mean, most = numbers["staleness_mean"], numbers["staleness_max"]
    if mean is None or most is None:
        return NOTHING
    return f"{mean['median']:.2f}/{max(_known(most['values'])):g}"


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _bytes(count: float) -> str:
    if count == 0:
        return NOTHING
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"

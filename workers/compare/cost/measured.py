"""What an experiment measured, as far as the model is compared with it; read from its results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.cost.reading import Reading, read
from hubring.workers.compare.experiment.setting import Setting


class Point(Struct, frozen=True):
    """One row in one setting.

    Attributes:
        key: The setting's.
        setting: Under which circumstances.
        reading: What the model makes of the row.
        step_seconds: Median.
        samples_per_second: Of all workers; None: not measured.
        compute_seconds: Of a step, what it did not wait for the exchange, mean; None: not measured.
    """

    key: str
    setting: Setting
    reading: Reading
    step_seconds: float
    samples_per_second: float | None
    compute_seconds: float | None = None

    @property
    def row(self) -> str:
        return self.reading.name

    @property
    def plain(self) -> bool:
        """Nobody is made slow, nobody is lost."""
        return self.setting.straggler is None and self.setting.fault is None

    @property
    def workers(self) -> int:
        return 1 if self.reading.alone else self.setting.workers


def points(results: Mapping[str, Any]) -> list[Point]:
    """What was measured, in the results' order; rows that are withheld, or of which there is no model, not.

    Args:
        results: `results.json`, version 2.
    """
    settings = {each["key"]: setting_of(each) for each in results["settings"]}
    found = [_point(row, settings) for row in results["rows"] if not row["withheld"]]
    return [point for point in found if point is not None]


def model_bytes(results: Mapping[str, Any]) -> int:
    """As `told_bytes`.

    Raises:
        UsageError: No row says.
    """
    told = told_bytes(results)
    if told is None:
        raise UsageError("no row of the results tells the model's size: give --model-bytes")
    return told


def told_bytes(results: Mapping[str, Any]) -> int | None:
    """Of the model that was trained: what a worker sends to a hub in a step, or around a ring.

    None where no row that is shown exchanged anything.
    """
    settings = {each["key"]: setting_of(each) for each in results["settings"]}
    for row in results["rows"]:
        if row["withheld"]:
            continue
        sent = _median(row, "bytes_sent_per_step")
        workers = settings[row["setting"]].workers
        if sent and row["row"].startswith("hub-"):
            return round(sent)
        if sent and row["row"] == "ring" and workers > 1:
            return round(sent * workers / (2 * (workers - 1)))
    return None


def setting_of(values: Mapping[str, Any]) -> Setting:
    """One of the results' settings."""
    return Setting.from_json({name: value for name, value in values.items() if name != "key"})


def _point(row: Mapping[str, Any], settings: Mapping[str, Setting]) -> Point | None:
    step, speed = _median(row, "step_ms"), _median(row, "samples_per_second")
    try:
        reading = read(row["row"])
    except UsageError:
        return None
    if step is None:
        return None
    compute = _median(row, "compute_ms")
    return Point(
        key=row["setting"],
        setting=settings[row["setting"]],
        reading=reading,
        step_seconds=step / 1e3,
        samples_per_second=speed,
        compute_seconds=None if compute is None else compute / 1e3,
    )


def _median(row: Mapping[str, Any], name: str) -> float | None:
    number = row["numbers"].get(name)
    return None if number is None else number["median"]

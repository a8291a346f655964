"""Measurements of an experiment, as input of the cost model."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from hubring.ps.core.errors import UsageError
from hubring.workers.compare.cost.row_case import Reading, read
from hubring.workers.compare.experiment.setting import Setting
from hubring.workers.compare.result.findings import Entry


class Point(Struct, frozen=True):
    """One row in one setting.

    Attributes:
        key: Key of the setting.
        setting: The setting.
        reading: The row in the model's terms.
        step_seconds: Median.
        samples_per_second: Of all workers; None: not measured.
        compute_seconds: Mean part of a step that does not wait for exchange; None: not measured.
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
        """Whether the setting has neither straggler nor fault."""
        return self.setting.straggler is None and self.setting.fault is None

    @property
    def workers(self) -> int:
        return 1 if self.reading.alone else self.setting.workers


def points(settings: Iterable[Setting], rows: Iterable[Entry]) -> list[Point]:
    """Returns the measurements in the rows' order, without rows that are withheld or have no model."""
    known = {each.key: each for each in settings}
    found = [_point(row, known[row.setting]) for row in rows if not row.withheld]
    return [point for point in found if point is not None]


def model_bytes(settings: Iterable[Setting], rows: Iterable[Entry]) -> int | None:
    """Returns the bytes of the trained model, from what a worker sends to a hub or around a ring.

    None if no row that is shown exchanged anything.
    """
    workers = {each.key: each.workers for each in settings}
    for row in rows:
        shown = row.exact and not row.withheld
        sent, n = row.median("bytes_sent_per_step") if shown else None, workers[row.setting]
        if sent and row.row.startswith("hub-"):
            return round(sent)
        if sent and row.row == "ring" and n > 1:
            return round(sent * n / (2 * (n - 1)))
    return None


def _point(row: Entry, setting: Setting) -> Point | None:
    step, compute = row.median("step_ms"), row.median("compute_ms")
    try:
        reading = read(row.row)
    except UsageError:
        return None
    if step is None:
        return None
    return Point(
        key=row.setting,
        setting=setting,
        reading=reading,
        step_seconds=step / 1e3,
        samples_per_second=row.median("samples_per_second"),
        compute_seconds=None if compute is None else compute / 1e3,
    )

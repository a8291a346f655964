"""Experiments whose measurements equal the predictions of the cost model, or a known factor more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from hubring.workers.compare.cost.prediction import Job, predict
from hubring.workers.compare.cost.score import Score
from hubring.workers.compare.experiment.experiment import Experiment
from hubring.workers.compare.experiment.setting import Link, Setting
from hubring.workers.compare.result.findings import Accuracy, Entry, Findings, Gate, Number
from hubring.workers.slowdown.straggler import Straggler
from tests.support.compare.calibration import CONSTANTS, LINKED


def number(value: float) -> Number:
    return Number([value] * 3, value, value, value)


def entry(
    name: str, setting: Setting, seconds: float, batch: float = 128, compute: float | None = None
) -> Entry:
    sent = (40 << 20) * (1.5 if name == "ring" else 1.0)
    numbers = {"step_ms": 1e3 * seconds, "samples_per_second": batch / seconds, "bytes_sent_per_step": sent}
    numbers |= {} if compute is None else {"compute_ms": 1e3 * compute}
    told = {name: number(value) for name, value in numbers.items()}
    return Entry(setting=setting.key, row=name, synchronous=True, numbers={**told})


def findings(settings: Sequence[Setting], rows: Sequence[Entry], **asked: Any) -> Findings:
    experiment = Experiment(**({"job": "digits"} | asked))
    return Findings(
        command="",
        asked=experiment,
        job=experiment.yardstick,
        machine={},
        settings=list(settings),
        gate=Gate(passed=True, tolerance=1e-4),
        rows=list(rows),
    )


def score(found: Findings, job: Job | None = None) -> Score:
    return Score(found.settings, found.rows, CONSTANTS, job or THEIRS)


THEIRS = Job(model_bytes=40 << 20, compute=0.05, together=True)
FINE = replace(THEIRS, slice_bytes=1 << 19)
APART = replace(THEIRS, together=False)
"""The same job with each host on its own machine."""


def experiment(job: Job = THEIRS, wrong: float = 1.0) -> Findings:
    """Returns the predictions as measurements; all settings except the first take `wrong` times as long."""
    links = [replace(LINKED, servers=k, link=Link(rate=rate)) for rate in (1e9, 2e8) for k in (1, 2, 4)]
    rows = [
        entry(row, setting, predict(CONSTANTS, row, setting, job).step_seconds * (wrong if place else 1))
        for place, setting in enumerate(links)
        for row in ("ring", "hub-bsp")
        if row == "hub-bsp" or setting.servers == 1
    ]
    return findings(links, rows, slice_bytes=job.slice_bytes)


def rounded(accuracy: Accuracy | None) -> Accuracy:
    assert accuracy is not None
    return replace(accuracy, mean_error=round(accuracy.mean_error, 9))


def listed(found: Findings) -> Findings:
    """Returns the same with a ring's run in every setting that differs only in servers."""
    rings = [row for row in found.rows if row.row == "ring"]
    again = [
        replace(row, setting=row.setting.replace("k1", f"k{servers}")) for row in rings for servers in (2, 4)
    ]
    return replace(found, rows=[*found.rows, *again])


def with_pauses(job: Job = THEIRS, workers: tuple[int, ...] = (2, 4, 8)) -> Findings:
    """Returns the model's predictions with a straggler, by workers, without runs that have none."""
    slow = Straggler(kind="constant", seconds=0.02, ranks=(1,))
    settings = [Setting(workers=count, straggler=slow) for count in workers]
    rows = [
        entry(row, setting, predict(CONSTANTS, row, setting, job).step_seconds)
        for setting in settings
        for row in ("ring", "hub-bsp")
    ]
    return findings(settings, rows)

"""Invented constants and sweeps for the cost model, and experiments that measure what it predicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from hubring.workers.compare.findings import Accuracy, Findings, Gate, RowResult
from hubring.workers.compare.plan.experiment import Experiment
from hubring.workers.compare.plan.setting import Link, Setting
from hubring.workers.compare.predict.calibrations import Constants, WireCosts
from hubring.workers.compare.predict.prediction import PredictedJob, predict
from hubring.workers.compare.predict.score import Score
from hubring.workers.compare.statistics import Number
from hubring.workers.runtime.slowdown import Straggler

WIRE = WireCosts(alpha=1e-4, beta=1e-9, cpu=0.5e-9)
CONSTANTS = Constants(
    wires=dict.fromkeys(("shm", "zmq", "grpc", "gloo"), WIRE),
    copy=1e-10,
    reduce=1e-10,
    apply={"sgd": 2e-10, "adam": 4e-10},
    serve=5e-5,
    cores=2,
    spread={"copy": (0.9e-10, 1.2e-10)},
    machine={"cores": 2},
    date="2026-11-21T12:00:00+00:00",
)
JOB = PredictedJob(nbytes=40 << 20, compute=0.1, batch=32)
LINKED = Setting(workers=4, servers=1, link=Link(rate=1e9))


def number(value: float) -> Number:
    return Number([value] * 3, value, value, value)


def entry(
    name: str, setting: Setting, seconds: float, batch: float = 128, compute: float | None = None
) -> RowResult:
    sent = (40 << 20) * (1.5 if name == "ring" else 1.0)
    numbers = {"step_ms": 1e3 * seconds, "samples_per_second": batch / seconds, "bytes_sent_per_step": sent}
    numbers |= {} if compute is None else {"compute_ms": 1e3 * compute}
    told = {name: number(value) for name, value in numbers.items()}
    return RowResult(setting=setting.key, row=name, synchronous=True, numbers={**told})


def findings(settings: Sequence[Setting], rows: Sequence[RowResult], **asked: Any) -> Findings:
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


def score(found: Findings) -> Score:
    return Score(found, CONSTANTS, THEIRS)


THEIRS = PredictedJob(nbytes=40 << 20, compute=0.05, together=True)
FINE = replace(THEIRS, slice_bytes=1 << 19)


def experiment(job: PredictedJob = THEIRS, wrong: float = 1.0) -> Findings:
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


def with_pauses(job: PredictedJob = THEIRS, workers: tuple[int, ...] = (2, 4, 8)) -> Findings:
    """Returns the model's predictions with a straggler, by workers, without runs that have none."""
    slow = Straggler(kind="constant", seconds=0.02, ranks=(1,))
    settings = [Setting(workers=count, straggler=slow) for count in workers]
    rows = [
        entry(row, setting, predict(CONSTANTS, row, setting, job).step_seconds)
        for setting in settings
        for row in ("ring", "hub-bsp")
    ]
    return findings(settings, rows)


HEAD = """\
# nThread 1 nGpus 1 minBytes {least} maxBytes {most} step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
{devices}
#
#                                                     out-of-place                   in-place
#       size         count   type  redop  root  time  algbw  busbw  #wrong  time  algbw  busbw  #wrong
#        (B)    (elements)                      (us)  (GB/s) (GB/s)         (us)  (GB/s) (GB/s)
"""
SIZES = tuple(1 << power for power in range(20, 31))


def output(nodes: int, gpus: int, busbw: float, *, listed: bool = True) -> str:
    """Returns the output of `nodes` hosts.

    Args:
        nodes: Number of hosts.
        gpus: GPUs of each.
        busbw: Bytes per second.
        listed: Whether the output lists its devices.
    """
    ranks = nodes * gpus
    devices = [
        f"#  Rank {rank:2} Group  0 Pid {4000 + rank} on n{rank // gpus} device {rank % gpus:2} [0x19] H100"
        for rank in range(ranks)
    ]
    share = 2 * (ranks - 1) / ranks
    rows = []
    for size in SIZES:
        seconds = share * size / busbw
        cells = f"{1e6 * seconds:8.2f} {size / seconds / 1e9:6.2f} {share * size / seconds / 1e9:6.2f}      0"
        rows.append(f"{size:12} {size // 4:13}     float     sum      -1 {cells} {cells}")
    head = HEAD.format(least=SIZES[0], most=SIZES[-1], devices="\n".join(devices if listed else ["#"]))
    return head + "\n".join(rows) + "\n# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 91.2\n#\n"

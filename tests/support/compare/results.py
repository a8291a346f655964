"""Invented results in the format of `results.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from hubring.workers.compare.findings import (
    Accuracy,
    Bandwidth,
    Crossover,
    CurvePoint,
    Findings,
    Gate,
    Pair,
    Prediction,
    RowResult,
    RunCurve,
    Scaling,
    decode,
    encode,
)
from hubring.workers.compare.plan.experiment import JOBS, Experiment, JobMetric, LinkTable, StragglerTable
from hubring.workers.compare.plan.setting import Link, Setting
from hubring.workers.compare.statistics import SPEEDS as SPEED_NAMES
from hubring.workers.compare.statistics import Load, MeasurementNoise, Number
from hubring.workers.peers.nccl_tests import algbw, busbw
from hubring.workers.runtime.slowdown import Straggler

GIGABIT = Link(rate=1e9, latency=0.0005)
SLOW = Link(rate=2e8)
BARE = Setting(workers=4)
SETTINGS = [
    BARE,
    *(Setting(workers=4, servers=k, link=link) for link in (GIGABIT, SLOW) for k in (1, 2, 4)),
    Setting(workers=4, straggler=Straggler(kind="pareto", seconds=0.02, ranks=(3,)), compute=0.05),
]
EMULATED = SETTINGS[-1]

SPEEDS = {
    ("local", BARE.key): 2410.0,
    **{("ring", Setting(workers=4, link=link).key): v for link, v in ((GIGABIT, 3950.0), (SLOW, 1180.0))},
    **{
        ("hub-bsp", Setting(workers=4, servers=k, link=link).key): v
        for link, speeds in ((GIGABIT, (1620.0, 2930.0, 4630.0)), (SLOW, (371.0, 735.0, 1432.0)))
        for k, v in zip((1, 2, 4), speeds, strict=True)
    },
    **{("hub-asp", Setting(workers=4, link=link).key): v for link, v in ((GIGABIT, 1840.0), (SLOW, 402.0))},
    **{("hub-ssp", Setting(workers=4, link=link).key): v for link, v in ((GIGABIT, 1790.0), (SLOW, 398.0))},
    ("ddp", Setting(workers=4, link=GIGABIT).key): 4010.0,
    ("hub-aggregate", Setting(workers=4, link=GIGABIT).key): 3100.0,
    **{(row, EMULATED.key): v for row, v in (("local", 512.0), ("ring", 1510.0), ("hub-bsp", 1530.0))},
    **{(row, EMULATED.key): v for row, v in (("hub-ssp", 1940.0), ("hub-asp", 2105.0))},
}
ASYNCHRONOUS = {"hub-ssp", "hub-asp"}
BATCH = 128


def read(results: Mapping[str, Any]) -> Findings:
    """Returns what a program reads from a file with these results."""
    return decode(json.dumps(results, allow_nan=False).encode())


def _written(findings: Findings) -> dict[str, Any]:
    """Returns what a file with these findings holds."""
    results: dict[str, Any] = json.loads(encode(findings))
    return results


def summary(values: Iterable[float | None]) -> dict[str, Any]:
    """Returns a number of all seeds in the file's format."""
    found: dict[str, Any] = to_builtins(Number.of(list(values)))
    return found


def _around(random: Random, value: float, spread: float) -> Number | None:
    return Number.of([value * math.exp(random.gauss(0, spread)) for _ in range(3)])


def _entry(row: str, setting: Setting, speed: float) -> RowResult:
    """Returns a row whose parts of a step match its speed."""
    random = Random(f"{row} {setting.key}")
    step, late = 1e3 * BATCH / speed, row in ASYNCHRONOUS
    compute = min(0.8 * step, 24.0 if setting.compute is None else 50.0)
    exposed = 0.97 * step - compute
    hub, alone = row.startswith("hub-"), row == "local"
    known = {
        "samples_per_second": speed,
        "step_ms": step,
        "seconds_to_target": (9000 if late else 7400) / speed,
        "samples_to_target": 9000 if late else 7400,
        "seconds": 14370 / speed,
        "final_loss": 0.171 if late else 0.142,
        "final_metric": 0.948 if late else 0.961,
        "compute_ms": compute,
        "exposed_ms": 0.0 if alone else exposed,
        "hidden_ms": None if alone else 0.2 * compute,
        "read_wait_ms": 0.3 * exposed if row == "hub-ssp" else None,
        "queue_ms": 0.1 * exposed if hub else None,
        "apply_ms": 1.7 if hub else None,
        "bytes_sent_per_step": None if alone else 2.2e6,
        "bytes_received_per_step": None if alone else 2.2e6,
        "staleness_mean": 2.9 if late else None,
        "staleness_max": 11.0 if late else None,
        "memory_mb": 312.0,
        "cpu_ms_per_step": 31.0,
    }
    exact = {"staleness_max", "bytes_sent_per_step", "bytes_received_per_step"}
    shut = row == "hub-aggregate"
    return RowResult(
        setting=setting.key,
        row=row,
        about=f"what {row} does, in one sentence",
        synchronous=not late,
        emulated=setting.emulated,
        seeds=[0, 1, 2],
        withheld="hub-aggregate differs from local by 0.031 in head.weight" if shut else None,
        numbers={
            name: None
            if value is None or (shut and name in SPEED_NAMES)
            else _around(random, value, 0 if name in exact else 0.02)
            for name, value in known.items()
        },
        staleness={str(age): 600 >> age for age in range(10)} if late else {},
    )


def _curve(row: str, setting: Setting, speed: float, seed: int) -> RunCurve:
    random = Random(f"{row} {setting.key} {seed}")
    slow = 1.35 if row in ASYNCHRONOUS else 1.0
    seen = [BATCH * step for step in range(1, 113)]
    losses = [2.3 * math.exp(-n / 3600 / slow) + 0.12 + random.uniform(0, 0.12) for n in seen]
    ends = [0, *seen[10::11]]
    accuracies = [0.97 - 0.87 * math.exp(-n / 2300 / slow) + random.gauss(0, 0.006) for n in ends]
    loss, metric = (
        [CurvePoint(n / speed, n, value) for n, value in zip(places, values, strict=True)]
        for places, values in ((seen, losses), (ends, accuracies))
    )
    if row == "hub-aggregate":  # which is withheld
        loss, metric = [replace(point, seconds=0.0) for point in loss], []
    return RunCurve(setting.key, row, seed, loss, metric)


def full() -> dict[str, Any]:
    """Returns results with all optional parts: links, servers, stragglers, a peer, a withheld row, nulls."""
    speeds = [
        (row, each, SPEEDS[row, each.key]) for each in SETTINGS for row, key in SPEEDS if key == each.key
    ]
    findings = Findings(
        command="ps-compare run links.toml --out results/links --note '<b>5 > 4 & \"3\"</b>'",
        asked=Experiment(
            name="links",
            about="Where does a hub of 1, 2 and 4 servers beat the ring?",
            job="digits",
            rows=tuple(dict.fromkeys(row for row, _ in SPEEDS)),
            seeds=(0, 1, 2),
            workers=(4,),
            servers=(1, 2, 4),
            batch=BATCH,
            link=LinkTable(rate=(1e9, 2e8), latency=(0.0005,)),
            straggler=StragglerTable(kind="pareto", seconds=(0.02,), ranks=(3,), baseline=True),
        ),
        job=JOBS["digits"],
        machine={
            "processor": "Intel(R) Xeon(R) Processor @ 2.60GHz",
            "cores": 2,
            "system": "Linux-6.1.0-x86_64-with-glibc2.36",
            "python": "3.11.2",
            "versions": {"hubring": "0.1.0", "torch": "2.13.0"},
            "commit": "0123abc",
        },
        noise=MeasurementNoise(
            load=Load(1.62, 2.31),
            foreign=Load(0.021, 0.34),
            spread={"ring": 0.021, "hub-bsp": 0.034, "hub-asp": 0.117, "local": None},
            quiet=False,
            said=["hub-asp varied by 11.7 % from seed to seed; differences below that mean nothing."],
        ),
        settings=SETTINGS,
        gate=Gate(False, 1e-4, [*_pairs(speeds)]),
        rows=[_entry(*each) for each in speeds],
        curves=[_curve(*each, seed) for each in speeds for seed in range(3)],
        predictions=_predictions(speeds),
        score=Accuracy(0.083, 5),
        crossover=[
            Crossover(setting, [], measured, [], predicted, True, 3, "k > n^2/(2(n-1))")
            for setting, measured, predicted in (("n4 1000mbit 0.5ms", 3.2, 2.8), ("n4 200mbit", 3.1, 2.7))
        ],
        scaling=_scaling(),
        bandwidth=_bandwidth(),
        verdict=[
            "With 4 servers the hub beats the ring on 1 Gbit/s links by 17 %; with 1 or 2 it loses.",
            "The hub loses with 1 server because all gradients pass its one link: 27.6 ms of each step are"
            " spent waiting for that.",
            "No speed is shown for hub-aggregate: it differs from local by 0.031 in head.weight.",
        ],
    )
    results = _written(findings)
    missed = next(
        each for each in results["rows"] if each["row"] == "hub-asp" and "200mbit" in each["setting"]
    )
    missed["numbers"] |= {"seconds_to_target": summary([24.1, None, 25.0]), "memory_mb": None}
    return results


def _pairs(ran: Sequence[tuple[str, Setting, float]]) -> Iterator[Pair]:
    for row, setting, _ in ran:
        for seed in range(3 if row not in (*ASYNCHRONOUS, "local") else 0):
            wrong = row == "hub-aggregate"
            yield Pair(
                setting=setting.key,
                seed=seed,
                first="local",
                second=row,
                difference="inf" if wrong and seed else 0.031 if wrong else 3.1e-6 * (seed + 1),
                tensor="head.weight",
                limit=1e-4,
                passed=not wrong,
            )
    yield Pair(
        setting=BARE.key,
        seed=0,
        first="hub-bsp",
        second="hub-bsp again",
        difference=0.0,
        tensor="any tensor",
        limit=0.0,
        passed=True,
    )


def _predictions(speeds: Sequence[tuple[str, Setting, float]]) -> list[Prediction]:
    found: list[Prediction] = []
    for row, setting, speed in speeds:
        if row in ("local", "ddp"):
            continue
        measured, by = 1e3 * BATCH / speed, "simulation" if row in ASYNCHRONOUS else "formula"
        error = Random(f"predicted {row} {setting.key}").uniform(-0.16, 0.12)
        predicted = measured * (1 + error)
        both = (measured, error) if row != "hub-aggregate" else (None, None)
        found.append(Prediction(setting.key, row, both[0], predicted, both[1], row == "ring", by))
    return [*found, Prediction("n64 k32", "hub-bsp", None, found[0].predicted_ms, None, calibrated=True)]


def _scaling() -> list[Scaling]:
    sizes = [1, 2, 4, 8, 16, 64, 256, 1024]
    return [
        Scaling(
            row,
            sizes,
            [base * n**power * 1.04 if n <= 8 else None for n in sizes],
            [base * n**power for n in sizes],
        )
        for row, base, power in (("ring", 1100.0, 0.87), ("hub-bsp", 800.0, 0.93), ("hub-asp", 905.0, 0.96))
    ]


def _bandwidth() -> list[Bandwidth]:
    size, key = 2_200_000, Setting(workers=4, link=GIGABIT).key
    shape = size, size // 4, "float", "avg"
    timed = [
        Bandwidth(key, row, *shape, time, algbw(size, time / 1e6), busbw(size, time / 1e6, 4), 0)
        for row, time in (("ring", 26500.0), ("hub-bsp", 70400.0))
    ]
    return [*timed, Bandwidth(key, "hub-aggregate", *shape, None, None, None, 7)]


def minimal() -> dict[str, Any]:
    """Returns results with one seed, one row and one setting, without any optional part."""
    setting = Setting(workers=2)
    numbers = {"samples_per_second": Number.of([812.0]), "step_ms": None}
    return _written(
        Findings(
            command="ps-compare run --rows ring",
            asked=Experiment(script=Path("train.py"), metric="val_acc", samples="tokens", seeds=(7,)),
            job=JobMetric("train.py", "val_acc", "val acc", samples="tokens"),
            machine={},
            settings=[setting],
            gate=Gate(True, 1e-4),
            rows=[RowResult(setting=setting.key, row="ring", synchronous=True, seeds=[7], numbers=numbers)],
        )
    )

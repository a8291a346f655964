"""Invented results in the format of `results.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

from msgspec import to_builtins

from hubring.workers.compare.experiment.setting import Link, Setting
from hubring.workers.compare.result.findings import Findings
from hubring.workers.compare.result.load_results import decode
from hubring.workers.compare.result.statistics import median_interval
from hubring.workers.slowdown.straggler import Straggler

WITHHELD_SPEED = 31337.0
"""Appears in every speed of the withheld row, so that a test can search for it."""

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
    ("hub-aggregate", Setting(workers=4, link=GIGABIT).key): WITHHELD_SPEED,
    **{(row, EMULATED.key): v for row, v in (("local", 512.0), ("ring", 1510.0), ("hub-bsp", 1530.0))},
    **{(row, EMULATED.key): v for row, v in (("hub-ssp", 1940.0), ("hub-asp", 2105.0))},
}
ASYNCHRONOUS = {"hub-ssp", "hub-asp"}
BATCH = 128
BY_BYTES = {"calibrated": True, "by_bytes": 3, "formula": "k > n^2/(2(n-1))"}
"""The fields of a crossover besides the measured and predicted ones."""


def read(results: Mapping[str, Any]) -> Findings:
    """Returns what a program reads from a file with these results."""
    return decode(json.dumps(results, allow_nan=False).encode())


def summary(values: Iterable[float | None]) -> dict[str, Any]:
    """Returns a number of all seeds in the file's format."""
    listed = list(values)
    found = median_interval([value for value in listed if value is not None])
    return {"values": listed, "median": found.median, "low": found.low, "high": found.high}


def around(random: Random, value: float, spread: float, seeds: int) -> dict[str, Any]:
    return summary(value * math.exp(random.gauss(0, spread)) for _ in range(seeds))


def entry(row: str, setting: Setting, speed: float, seeds: int = 3) -> dict[str, Any]:
    """Returns a row whose parts of a step match its speed."""
    random = Random(f"{row} {setting.key}")
    step, late = 1e3 * BATCH / speed, row in ASYNCHRONOUS
    compute = min(0.8 * step, 24.0 if setting.compute is None else 50.0)
    exposed = 0.97 * step - compute
    hub = row.startswith("hub-")
    known = {
        "samples_per_second": speed,
        "step_ms": step,
        "seconds_to_target": (9000 if late else 7400) / speed,
        "samples_to_target": 9000 if late else 7400,
        "seconds": 14370 / speed,
        "final_loss": 0.171 if late else 0.142,
        "final_metric": 0.948 if late else 0.961,
        "compute_ms": compute,
        "exposed_ms": exposed if row != "local" else 0.0,
        "hidden_ms": 0.2 * compute if row != "local" else None,
        "read_wait_ms": 0.3 * exposed if row == "hub-ssp" else None,
        "queue_ms": 0.1 * exposed if hub else None,
        "apply_ms": 1.7 if hub else None,
        "bytes_sent_per_step": None if row == "local" else 2.2e6,
        "bytes_received_per_step": None if row == "local" else 2.2e6,
        "staleness_mean": 2.9 if late else None,
        "staleness_max": 11.0 if late else None,
        "memory_mb": 312.0,
        "cpu_ms_per_step": 31.0,
    }
    exact = {"staleness_max", "bytes_sent_per_step", "bytes_received_per_step"}
    shut = row == "hub-aggregate"
    return {
        "setting": setting.key,
        "row": row,
        "about": f"what {row} does, in one sentence",
        "synchronous": not late,
        "emulated": setting.emulated,
        "seeds": list(range(seeds)),
        "failed": None,
        "withheld": "hub-aggregate differs from local by 0.031 in head.weight" if shut else None,
        "numbers": {
            name: None
            if value is None
            else around(random, value, 0 if shut or name in exact else 0.02, seeds)
            for name, value in known.items()
        },
        "staleness": _staleness(random, 0.35 if row == "hub-asp" else 0.6) if late else {},
    }


def _staleness(random: Random, freshness: float) -> dict[str, int]:
    counts: dict[str, int] = {}
    for _ in range(1200):
        age = min(11, int(random.expovariate(freshness)))
        counts[str(age)] = counts.get(str(age), 0) + 1
    return counts


def curves(row: str, setting: Setting, speed: float, seeds: int = 3) -> list[dict[str, Any]]:
    return [_curve(row, setting, speed, seed) for seed in range(seeds)]


def _curve(row: str, setting: Setting, speed: float, seed: int) -> dict[str, Any]:
    random = Random(f"{row} {setting.key} {seed}")
    slow = 1.35 if row in ASYNCHRONOUS else 1.0
    seen = [BATCH * step for step in range(1, 113)]
    losses = [2.3 * math.exp(-n / 3600 / slow) + 0.12 + random.uniform(0, 0.12) for n in seen]
    ends = [0, *seen[10::11]]
    accuracies = [0.97 - 0.87 * math.exp(-n / 2300 / slow) + random.gauss(0, 0.006) for n in ends]
    return {
        "setting": setting.key,
        "row": row,
        "seed": seed,
        "loss": [{"seconds": n / speed, "samples": n, "value": v} for n, v in zip(seen, losses, strict=True)],
        "metric": [
            {"seconds": n / speed, "samples": n, "value": v} for n, v in zip(ends, accuracies, strict=True)
        ],
    }


def full() -> dict[str, Any]:
    """Returns results with all optional parts: links, servers, stragglers, a peer, a withheld row, nulls."""
    ran = [(row, setting) for setting in SETTINGS for row, key in SPEEDS if key == setting.key]
    speeds = [(row, setting, SPEEDS[row, setting.key]) for row, setting in ran]
    results = {
        "version": 3,
        "command": "ps-compare run links.toml --out results/links --note '<b>5 > 4 & \"3\"</b>'",
        "experiment": {
            "name": "links",
            "about": "Where does a hub of 1, 2 and 4 servers beat the ring?",
            "job": "digits",
            "script": None,
            "rows": list(dict.fromkeys(row for row, _ in SPEEDS)),
            "seeds": [0, 1, 2],
            "workers": [4],
            "servers": [1, 2, 4],
            "batch": BATCH,
            "lr": "same",
            "link": {"rate": [1e9, 2e8], "latency": [0.0005], "jitter": 0.0},
            "straggler": {"kind": "pareto", "seconds": [0.02], "ranks": [3], "shape": 2.5, "baseline": True},
        },
        "job": {"name": "digits", "metric": "test_accuracy", "title": "test accuracy", "target": 0.93}
        | {"rising": True, "samples": "images", "learning_rate": 0.01},
        "machine": {
            "processor": "Intel(R) Xeon(R) Processor @ 2.60GHz",
            "cores": 2,
            "system": "Linux-6.1.0-x86_64-with-glibc2.36",
            "python": "3.11.2",
            "versions": {"hubring": "0.1.0", "torch": "2.13.0"},
            "commit": "0123abc",
        },
        "noise": {
            "load": {"median": 1.62, "max": 2.31},
            "foreign": {"median": 0.021, "max": 0.34},
            "spread": {"ring": 0.021, "hub-bsp": 0.034, "hub-asp": 0.117, "local": None},
            "quiet": False,
            "said": ["hub-asp varied by 11.7 % from seed to seed; differences below that mean nothing."],
        },
        "settings": [to_builtins(each) for each in SETTINGS],
        "gate": _gate(ran),
        "rows": [entry(row, setting, speed) for row, setting, speed in speeds],
        "curves": [curve for row, setting, speed in speeds for curve in curves(row, setting, speed)],
        "predictions": _predictions(speeds),
        "score": {"mean_error": 0.083, "settings": 5},
        "crossover": [
            {"setting": "n4 1000mbit 0.5ms", "measured": 3.2, "predicted": 2.8, **BY_BYTES},
            {"setting": "n4 200mbit", "measured": 3.1, "predicted": 2.7, **BY_BYTES},
        ],
        "scaling": _scaling(),
        "bandwidth": _bandwidth(),
        "verdict": [
            "With 4 servers the hub beats the ring on 1 Gbit/s links by 17 %; with 1 or 2 it loses.",
            "The hub loses with 1 server because all gradients pass its one link: 27.6 ms of each step are"
            " spent waiting for that.",
            "With stragglers hub-asp reached 0.93 test accuracy first, in 4.28 s; the ring"
            " waits for the slowest.",
            "hub-asp is fastest a step with 1 Gbit/s links, yet needs 22 % more samples to the target.",
            "No speed is shown for hub-aggregate: it differs from local by 0.031 in head.weight.",
        ],
    }
    rows: list[dict[str, Any]] = results["rows"]  # type: ignore[assignment]
    missed = next(each for each in rows if each["row"] == "hub-asp" and "200mbit" in each["setting"])
    missed["numbers"]["seconds_to_target"] = summary([24.1, None, 25.0])
    missed["numbers"]["memory_mb"] = None
    return results


def _gate(ran: Sequence[tuple[str, Setting]]) -> dict[str, Any]:
    pairs = []
    for row, setting in ran:
        for seed in range(3 if row not in (*ASYNCHRONOUS, "local") else 0):
            wrong = row == "hub-aggregate"
            pairs.append(
                {"setting": setting.key, "seed": seed, "first": "local", "second": row}
                | {"difference": "inf" if wrong and seed else 0.031 if wrong else 3.1e-6 * (seed + 1)}
                | {"tensor": "head.weight", "limit": 1e-4, "passed": not wrong}
            )
    again = {"setting": BARE.key, "seed": 0, "first": "hub-bsp", "second": "hub-bsp again"}
    pairs.append({**again, "difference": 0.0, "tensor": "any tensor", "limit": 0.0, "passed": True})
    return {"passed": False, "tolerance": 1e-4, "pairs": pairs}


def _predictions(speeds: Sequence[tuple[str, Setting, float]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for row, setting, speed in speeds:
        if row in ("local", "ddp"):
            continue
        measured = 1e3 * BATCH / speed
        error = Random(f"predicted {row} {setting.key}").uniform(-0.16, 0.12)
        found.append(
            {"setting": setting.key, "row": row, "measured_ms": measured, "calibrated": row == "ring"}
            | {"predicted_ms": measured * (1 + error), "error": error}
            | {"by": "simulation" if row in ASYNCHRONOUS else "formula"}
        )
    found.append({**found[0], "row": "hub-bsp", "setting": "n64 k32", "measured_ms": None, "error": None})
    return found


def _scaling() -> list[dict[str, Any]]:
    sizes = [1, 2, 4, 8, 16, 64, 256, 1024]
    return [
        {
            "row": row,
            "workers": sizes,
            "measured": [base * n**power * 1.04 if n <= 8 else None for n in sizes],
            "predicted": [base * n**power for n in sizes],
        }
        for row, base, power in (("ring", 1100.0, 0.87), ("hub-bsp", 800.0, 0.93), ("hub-asp", 905.0, 0.96))
    ]


def _bandwidth() -> list[dict[str, Any]]:
    size, ring = 2_200_000, GIGABIT
    key = Setting(workers=4, link=ring).key
    times = {"ring": 26500.0, "hub-bsp": 70400.0, "hub-aggregate": WITHHELD_SPEED}
    return [
        {"setting": key, "row": row, "size": size, "count": size // 4, "type": "float", "redop": "avg"}
        | {"time": time, "algbw": size / time / 1e3, "busbw": 1.5 * size / time / 1e3}
        | {"wrong": 7 if row == "hub-aggregate" else 0}
        for row, time in times.items()
    ]


def minimal() -> dict[str, Any]:
    """Returns results with one seed, one row and one setting, without any optional part."""
    setting = Setting(workers=2)
    return {
        "version": 3,
        "command": "ps-compare run --rows ring",
        "experiment": {"script": "train.py", "metric": "val_acc", "samples": "tokens", "seeds": [7]},
        "job": {
            "name": "train.py",
            "metric": "val_acc",
            "title": "val acc",
            "samples": "tokens",
        },
        "machine": {},
        "noise": {"load": {"median": None, "max": None}, "spread": {}, "quiet": True, "said": []},
        "settings": [to_builtins(setting)],
        "gate": {"passed": True, "tolerance": 1e-4, "pairs": []},
        "rows": [
            {
                "setting": setting.key,
                "row": "ring",
                "about": "",
                "synchronous": True,
                "emulated": False,
                "seeds": [7],
                "withheld": None,
                "numbers": {"samples_per_second": summary([812.0]), "step_ms": None},
                "staleness": {},
            }
        ],
        "curves": [],
        "predictions": [],
        "score": None,
        "crossover": [],
        "scaling": [],
        "verdict": [],
    }

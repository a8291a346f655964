"""Runs that are incomplete, that report other units than the rest, or that had other conditions."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from hubring.workers.compare.plan.experiment import StragglerTable
from hubring.workers.compare.plan.run_order import PlannedRun
from hubring.workers.compare.run.outcome import EARLY, Line, audit_file
from hubring.workers.runtime.conditions import DELAYS, EXCHANGE
from tests.support.compare.replayed import record
from tests.workers.compare.plants.frame import EPOCHS, ROWS, Plant

STEPS = 3 * EPOCHS
SEEDS = (0, 1, 2)
FOUR = (*ROWS, "ddp")

CLEAN: dict[str, Any] = {
    "threads": "1",
    "cores": "2",
    "niceness": "0",
    "default dtype": "float32",
    "deterministic algorithms": "False",
    "torch.backends.cuda.matmul.fp32_precision": "none",
    "torch.backends.mkldnn.enabled": "True",
    "evaluations per step": 0.042,
    "ms in time.sleep() per step": 0.0,
    DELAYS: "none",
    "autocast": "False",
    EXCHANGE: "ends in its step",
}
"""The conditions of a rank that a worker records, without some flags."""


def _results(changed: dict[str, dict[str, Any]], *, steps: int = STEPS) -> dict[str, Any]:
    """Returns what the workers of each row report, of which some had other conditions."""
    return {row: {"steps": steps, "conditions": CLEAN | changed.get(row, {})} for row in FOUR}


def _lines(change: Callable[[PlannedRun, Line], Line | None] = lambda run, line: line) -> Any:
    """Returns the records of runs; `change` changes or removes a line."""

    def records(run: PlannedRun) -> list[Line]:
        lines = record(0.01, STEPS, every=6, samples=12 // run.row.workers(2))
        kept = (change(run, line) for line in lines)
        return [line for line in kept if line is not None]

    return records


def _replays(
    change: Callable[[PlannedRun, Line], Line | None] = lambda run, line: line, /, **conditions: Any
) -> dict[str, Any]:
    rows = {name.replace("_", "-"): each for name, each in conditions.items()}
    return {"records": _lines(change), "results": _results(rows)}


def _other(name: str, value: str | float, row: str = "ring", rows: tuple[str, ...] = ROWS) -> Plant:
    """Returns a row with another value of a condition."""
    mine, usual = (each if isinstance(each, str) else f"{each:g}" for each in (value, CLEAN[name]))
    said = f"{name}: {mine} on rank 0 of {row}, and {usual} on rank 0 of "
    return Plant((said,), rows=rows, replays=_replays(**{row.replace("-", "_"): {name: value}}))


def _of(run: PlannedRun, row: str, seed: int | None = None) -> bool:
    return run.row.name == row and seed in (None, run.seed)


def _removing(file: str, row: str, seed: int | None = None) -> Callable[[PlannedRun, Path], None]:
    def spoil(run: PlannedRun, folder: Path) -> None:
        for path in folder.glob(file) if _of(run, row, seed) else ():
            path.unlink()

    return spoil


def _cut(rank: int, lines: int) -> Callable[[PlannedRun, Path], None]:
    def spoil(run: PlannedRun, folder: Path) -> None:
        path = folder / f"record {rank}.jsonl"
        if _of(run, "ring"):
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))

    return spoil


def _short_audit(run: PlannedRun, folder: Path) -> None:
    """The record of the ring's last steps is cut off, on every rank."""
    for rank in range(2 if _of(run, "ring") else 0):
        path = audit_file(folder, rank)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _drifting(factor: float, *rows: str) -> Callable[[PlannedRun, Path], None]:
    def spoil(run: PlannedRun, folder: Path) -> None:
        final, early = folder / "parameters.safetensors", folder / f"parameters step{EARLY}.safetensors"
        shutil.copy(final, early)
        if run.row.name in rows:
            save_file({name: factor * each for name, each in load_file(final).items()}, final)

    return spoil


def _every_fifth(run: PlannedRun, line: Line, row: str = "ring") -> Line | None:
    return line if not _of(run, row) or "epoch" in line or line["step"] % 5 == 0 else None


def _one_epoch_fewer(run: PlannedRun, line: Line) -> Line | None:
    return line if not _of(run, "ring") or line["step"] <= STEPS - 6 else None


def _counted_by_all(run: PlannedRun, folder: Path, *, every: bool = False) -> None:
    for path in folder.glob("record*") if every or _of(run, "ring") else ():
        path.write_text(path.read_text().replace('"samples": 6', '"samples": 12'))


def _worse(factor: float, seed: int | None = None) -> Callable[[PlannedRun, Line], Line]:
    def change(run: PlannedRun, line: Line) -> Line:
        worse = _of(run, "ring", seed) and "test_accuracy" in line
        return {**line, "test_accuracy": factor * line["test_accuracy"]} if worse else line

    return change


def _error(run: PlannedRun, line: Line) -> Line:
    """The metric is an error, which ends at 0.01 and in one row at 0.015."""
    error = 1.01 - line.get("test_accuracy", 0.0) + 0.005 * _of(run, "ring")
    return {**line, "test_accuracy": error} if "test_accuracy" in line else line


_ONE_SLOW = {"straggler": StragglerTable(kind="constant", seconds=(0.02,))}
_SLOWED = {DELAYS: "constant20ms"}

PLANTS: dict[str, Plant] = {
    "a row without records": Plant(
        ("1 of 1 runs: rank 0 recorded fewer than two steps",),
        spoils=_removing("record*", "ring"),
        replays=_replays(),
    ),
    "a rank without a record": Plant(
        ("1 of 1 runs: rank 1 recorded fewer than two steps",),
        spoils=_removing("record 1.jsonl", "hub-bsp"),
        replays=_replays(),
    ),
    "a rank without steps": Plant(
        ("1 of 1 runs: rank 1 recorded fewer than two steps",), spoils=_cut(1, 0), replays=_replays()
    ),
    "a seed without records": Plant(
        ("1 of 3 runs: rank 0 recorded fewer than two steps",),
        spoils=_removing("record*", "ring", seed=1),
        replays=_replays(),
        asked={"seeds": SEEDS},
    ),
    "a row that the gate could not judge": Plant(
        ("ring is wrong (seed 0): rank 0 left no record of its steps",),
        spoils=_removing("audit*", "ring"),
        replays=_replays(),
    ),
    "a rank that the gate could not judge": Plant(
        ("hub-bsp is wrong (seed 0): rank 1 left no record of its steps",),
        spoils=_removing("audit 1.msgpack", "hub-bsp"),
        replays=_replays(),
    ),
    "steps that the gate could not judge": Plant(
        ("ring is wrong (seed 0)",), spoils=_short_audit, replays=_replays()
    ),
    "an epoch fewer": Plant(
        (f"reported steps: {STEPS - 6} on rank 0 of ring, and {STEPS} on rank 0 of local (seed 0)",),
        replays={"records": _lines(_one_epoch_fewer)},
    ),
    "a rank with fewer reports": Plant(
        (f"reported steps: 8 on rank 1 of ring, and {STEPS} on rank 0 of local (seed 0)",),
        spoils=_cut(1, 10),
        replays={"records": _lines()},
    ),
    "reports of every fifth step": Plant(
        (f"rank 0 took {STEPS} steps and reported {STEPS // 5} of them; call hubring.report(",),
        replays=_replays(_every_fifth),
    ),
    "the samples of all ranks, reported by each": Plant(
        ("reported samples for each that the model got: 2 in ring, which has 2 ranks (seed 0)",),
        rows=FOUR[1:3],
        spoils=_counted_by_all,
        replays=_replays(),
    ),
    "the whole batch, reported by each rank": Plant(
        ("reported samples for each that the model got: 2 in ring, which has 2 ranks (seed 0)",),
        spoils=_counted_by_all,
        replays=_replays(),
    ),
    "the whole batch, reported by each rank of all rows": Plant(
        ("reported samples for each that the model got: 2 in ring, which has 2 ranks (seed 0)",),
        rows=("ring", "hub-bsp"),
        spoils=partial(_counted_by_all, every=True),
        replays=_replays(),
    ),
    "more threads": _other("threads", "2"),
    "more threads, in one of two rows": Plant(
        ("threads: 1 on rank 0 of local, and 2 on rank 0 of ring (seed 0)",),
        rows=("local", "ring"),
        replays=_replays(ring={"threads": "2"}),
    ),
    "one core": _other("cores", "1", "hub-bsp"),
    "a low priority": _other("niceness", "10"),
    "another default dtype": _other("default dtype", "float64"),
    "TF32": _other("torch.backends.cuda.matmul.fp32_precision", "tf32"),
    "TF32 in some steps": _other("torch.backends.cuda.matmul.fp32_precision", "none, tf32", "hub-bsp"),
    "deterministic algorithms": _other("deterministic algorithms", "True", "local"),
    "no oneDNN": _other("torch.backends.mkldnn.enabled", "False"),
    "autocast in one row": _other("autocast", "True"),
    "evaluation in every step": _other("evaluations per step", 1.04),
    "evaluation in every fifth step": _other("evaluations per step", 0.242, "hub-bsp"),
    "a script that sleeps": _other("ms in time.sleep() per step", 2.0),
    "an exchange that steps do not wait for": _other(
        EXCHANGE, "may end in the next step", rows=("ring", "hub-bsp")
    ),
    "a delay that was not asked for": Plant(
        (f"{DELAYS}: constant20ms on rank 0 of ring, and as asked on rank 0 of local",),
        replays=_replays(ring=_SLOWED),
    ),
    "a row without the delay that was asked for": Plant(
        (f"{DELAYS}: none on rank 0 of ring, and as asked on rank 0 of local",),
        replays=_replays(local=_SLOWED, hub_bsp=_SLOWED),
        asked=_ONE_SLOW,
    ),
    "a lower final metric": Plant(
        ("final test_accuracy: 0.75 in ring, and 1 in local (seed 0)",), replays=_replays(_worse(0.75))
    ),
    "a lower final metric with one of three seeds": Plant(
        ("final test_accuracy: 0.75 in ring, and 1 in local (seed 1)",),
        replays=_replays(_worse(0.75, seed=1)),
        asked={"seeds": SEEDS},
    ),
    "a drift of one row": Plant(
        ("difference from local at the end: 0.5 in ring, and ",),
        spoils=_drifting(1.5, "ring"),
        replays=_replays(),
    ),
}
CONTROLS: dict[str, Plant] = {
    "complete runs": Plant(replays=_replays()),
    "complete runs with three seeds": Plant(replays=_replays(), asked={"seeds": SEEDS}),
    "runs of an earlier version": Plant(replays={"records": _lines()}),
    "the same autocast and threads everywhere": Plant(
        replays={
            "records": _lines(),
            "results": _results({row: {"autocast": "True", "threads": "2"} for row in FOUR}),
        }
    ),
    "one evaluation more": Plant(replays=_replays(ring={"evaluations per step": 0.083})),
    "sleeps that vary": Plant(
        replays=_replays(
            local={"ms in time.sleep() per step": 5.0}, ring={"ms in time.sleep() per step": 5.4}
        )
        | {"results": _results({row: {"ms in time.sleep() per step": 5.0 + 0.1 * len(row)} for row in FOUR})}
    ),
    "an unreported step at the end of each epoch": Plant(
        replays=_replays(lambda run, line: line if line["step"] != 12 or "epoch" in line else None)
    ),
    "the delay that was asked for": Plant(
        replays={"records": _lines(), "results": _results(dict.fromkeys(FOUR, _SLOWED))}, asked=_ONE_SLOW
    ),
    "a metric that differs by rounding": Plant(replays=_replays(_worse(0.97))),
    "an error that is nearly zero": Plant(replays=_replays(_error)),
    "a metric that scatters": Plant(
        replays=_replays(
            lambda run, line: _worse(0.8)(
                run, {**line, "test_accuracy": line.get("test_accuracy", 0) * (1 - 0.1 * run.seed)}
            )
        ),
        asked={"seeds": SEEDS},
    ),
    "all rows drift": Plant(spoils=_drifting(1.5, "ring", "hub-bsp"), replays=_replays()),
    "a library's row whose steps overlap less": Plant(
        rows=FOUR[:3], replays=_replays(ring={EXCHANGE: "ends in its step"}, local={EXCHANGE: "other"})
    ),
}

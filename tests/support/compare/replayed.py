"""Comparisons without training: a test sets the records and parameters of every run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file

from hubring.workers.compare.comparison import Comparison
from hubring.workers.compare.decide.results import results
from hubring.workers.compare.findings import Findings, encode
from hubring.workers.compare.measure import measure
from hubring.workers.compare.plan.experiment import Experiment
from hubring.workers.compare.plan.run_order import PlannedRun, runs
from hubring.workers.compare.run.noise import RunNoise
from hubring.workers.compare.run.outcome import EARLY, Line, RunOutcome, digest
from hubring.workers.compare.run.runner import Runner
from hubring.workers.compare.show.screen import RunScreen

QUIET = RunNoise((0.1, 0.2), 0.01)
MACHINE = {"processor": "an abacus", "cores": 2}


def experiment(**changes: Any) -> Experiment:
    """Returns a small experiment: four rows of digits, two workers, two seeds."""
    rows = ("local", "ring", "hub-bsp", "hub-asp")
    return Experiment(**({"job": "digits", "rows": rows, "seeds": (0, 1)} | changes))


def record(
    step_seconds: float,
    steps: int = 100,
    every: int = 10,
    pause: float = 3.0,
    samples: int = 32,
    exposed: float = 0.005,
    hidden: float | None = 0.003,
) -> list[Line]:
    """Returns rank 0's record, with a measurement before the first step and after every tenth step.

    A measurement takes `pause` seconds. Every step waits `exposed` seconds for its exchange, and overlaps
    `hidden` seconds of it; None: not counted.
    """
    now, lines = 0.0, list[Line]()
    for step in range(steps + 1):
        exchange: dict[str, Any] = {
            "exposed_seconds": exposed * step,
            "hidden_seconds": None if hidden is None else hidden * step,
        }
        if step:
            now += step_seconds
            lines.append({"step": step, "seconds": now, "loss": 2.0 / step, "samples": samples} | exchange)
        if step % every == 0:
            now += pause
            lines.append(
                {"step": step, "seconds": now, "epoch": step // every}
                | {"test_loss": 1 / (1 + step), "test_accuracy": step / steps}
                | exchange
            )
    return lines


@dataclass
class Replayed:
    """A runner that starts no programs.

    Attributes:
        records: Rank 0's record by row and seed, used for all ranks; default: 10 ms per step.
        parameters: The value of every final parameter by the run's label; default: 1.
        early: The value of every parameter after the first steps; None: it is not saved then.
        results: Additional values in the workers' last lines, by row.
        server: Additional values in the server's last line, by row.
        failed: Why a row failed.
        noise: Of every run.
        noises: Of a run, on each machine; None: `noise`.
        disturbed: Machines that are not idle.
        script: The script whose digest every run records; None: a built-in job.
        ran: Labels of the requested runs, in order.
    """

    records: Callable[[PlannedRun], list[Line]] = lambda run: record(0.01)
    parameters: Mapping[str, float] = field(default_factory=dict)
    early: float | None = None
    results: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    server: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    noise: RunNoise = QUIET
    noises: Callable[[PlannedRun], Sequence[RunNoise]] | None = None
    disturbed: Sequence[str] = ()
    script: Path | None = None
    ran: list[str] = field(default_factory=list)

    def busy(self) -> list[str]:
        return list(self.disturbed)

    def run(self, run: PlannedRun, folder: Path, progress: Callable[[Line], None]) -> RunOutcome:
        self.ran.append(run.label)
        folder.mkdir(parents=True, exist_ok=True)
        lines = self.records(run)
        workers = run.row.workers(run.setting.workers)
        for rank in range(workers):
            text = "".join(f"{json.dumps(line)}\n" for line in lines)
            (folder / f"record {rank}.jsonl").write_text(text)
        saved = {"parameters": self.parameters.get(run.label, 1.0), f"parameters step{EARLY}": self.early}
        for name, value in saved.items():
            if value is not None:
                save_file({"w": torch.full((3,), value)}, folder / f"{name}.safetensors")
        progress({"step": 1})
        outcome = RunOutcome(
            run=run,
            folder=folder,
            commands=[f"ps-worker {run.row.name}"],
            began="2026-01-02T03:04:05+00:00",
            seconds=50.0,
            noise=[self.noise] if self.noises is None else self.noises(run),
            results=[self._result(run, rank) for rank in range(workers)],
            server={"shards": []} | dict(self.server.get(run.row.name, {})) if run.row.on_hub else None,
            failed=self.failed.get(run.row.name) if run.setting.fault else None,
            script=digest(self.script),
        )
        outcome.write()
        return outcome

    def _result(self, run: PlannedRun, rank: int) -> dict[str, Any]:
        exchange = {"bytes_sent": 4000, "bytes_received": 6000, "exposed_seconds": 0.5}
        exchange |= {"staleness_mean": rank + 1.0, "staleness_max": 5 * rank}
        more = self.results.get(run.row.name, {})
        usage = {"cpu_seconds": 1.0, "peak_bytes": 300_000_000}
        return {
            "exchange": exchange | dict(more.get("exchange", {})),
            "usage": usage | dict(more.get("usage", {})),
            "device": more.get("device", "cpu"),
            **{name: more[name] for name in ("steps", "conditions") if name in more},
        }


@dataclass
class Heard:
    """Records the output of a comparison."""

    skipped_runs: list[str] = field(default_factory=list)
    finished_runs: list[str] = field(default_factory=list)
    repeated_runs: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def progress(self, run: str, line: Line) -> None:
        pass

    def finished(self, run: str) -> None:
        self.finished_runs.append(run)

    def skipped(self, run: str) -> None:
        self.skipped_runs.append(run)

    def again(self, run: str) -> None:
        self.repeated_runs.append(run)

    def checking(self, run: str) -> None:
        pass

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def findings(folder: Path, trainer: Replayed | None = None, **changes: Any) -> Findings:
    """Returns the outcome of an experiment with replayed runs; writes only the runs of its folder."""
    asked, replay = experiment(**changes), trainer or Replayed()
    outcomes = {run.label: replay.run(run, folder / run.label, lambda line: None) for run in runs(asked)}
    numbers = {label: measure(each, asked.yardstick, asked.warmup) for label, each in outcomes.items()}
    return results(asked, outcomes, numbers, MACHINE, "ps-compare run --rows '<all>'")


def compared(folder: Path, trainer: Replayed | None = None, **changes: Any) -> dict[str, Any]:
    """Returns the same as in `results.json`."""
    found: dict[str, Any] = json.loads(encode(findings(folder, trainer, **changes)))
    return found


def carried_out(folder: Path, trainer: Replayed, **changes: Any) -> tuple[dict[str, Any], Heard]:
    """Returns the same with the whole folder, and the output."""
    heard, comparison = Heard(), Comparison.begin(experiment(**changes), folder, "ps-compare run")
    comparison.run(cast(Runner, trainer), cast(RunScreen, heard))
    return json.loads((folder / "results.json").read_text()), heard


def row(results: Mapping[str, Any], name: str, setting: int = 0) -> dict[str, Any]:
    """Returns a row of one setting."""
    key = results["settings"][setting]["key"]
    found: list[dict[str, Any]] = [each for each in results["rows"] if each["setting"] == key]
    return next(each for each in found if each["row"] == name)


SEEDS = (0, 1, 2)
CALM = (1.0, 1.02, 0.98)
"""Small differences between seeds, the same in all rows."""


def paced(
    steps: dict[str, float],
    noise: Mapping[str, tuple[float, ...]] | None = None,
    waits: dict[str, float] | None = None,
) -> Replayed:
    """Returns rows with these seconds per step (default 10 ms) and of waiting (default 5 ms)."""

    def records(run: PlannedRun) -> list[Line]:
        name = run.row.name
        factors = (noise or {}).get(name, CALM)
        exposed = (waits or {}).get(name, 0.005)
        return record(steps.get(name, 0.01) * factors[run.seed], pause=0.0, exposed=exposed)

    return Replayed(records=records)


def verdict(folder: Path, trainer: Replayed, **changes: Any) -> str:
    found: list[str] = compared(folder, trainer, **{"seeds": SEEDS, **changes})["verdict"]
    return "\n".join(found)

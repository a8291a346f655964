"""`ps-compare run`: trains, judges, measures and reports; resumes an interrupted comparison."""

from __future__ import annotations

import sys
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hubring.ps.config import terminal
from hubring.workers.compare.command import resume_command, typed

if TYPE_CHECKING:
    from hubring.workers.compare.cluster.task import Task
    from hubring.workers.compare.experiment.experiment import Experiment
    from hubring.workers.compare.result.findings import Findings, Number

DEFAULT = "digits"
"""The built-in experiment that runs by default."""


def run(
    experiment: Annotated[
        str | None,
        typer.Argument(help="TOML file or name of a built-in experiment, see ps-compare list [digits]"),
    ] = None,
    job: Annotated[str | None, typer.Option(help="built-in job: digits or char-lm")] = None,
    script: Annotated[Path | None, typer.Option(help="your training script; needs --metric")] = None,
    arguments: Annotated[
        str | None, typer.Option(help="for the job or script; {seed} {batch} {lr} {epochs} are filled in")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="key of hubring.report() to compare")] = None,
    rows: Annotated[
        str | None, typer.Option(help="ways to train, comma-separated, see ps-compare list [experiment's]")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="comma-separated; 0 is one seed [0,1,2]")] = None,
    repeats: Annotated[int | None, typer.Option(help="runs with the same seed [1]")] = None,
    workers: Annotated[str | None, typer.Option(help="numbers of workers, comma-separated [2]")] = None,
    servers: Annotated[str | None, typer.Option(help="numbers of hub shards, comma-separated [1]")] = None,
    transport: Annotated[str | None, typer.Option(help="of the hub: auto, shm, zmq or grpc [auto]")] = None,
    backend: Annotated[str | None, typer.Option(help="of ring and torch's rows: gloo or nccl [gloo]")] = None,
    batch: Annotated[int | None, typer.Option(help="samples per step over all workers [the job's]")] = None,
    lr: Annotated[
        str | None,
        typer.Option(help="scaling of the learning rate: same, linear or per-worker [same]"),
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="before --lr scales it [the job's]")] = None,
    epochs: Annotated[int | None, typer.Option(help="passes over the data [the job's]")] = None,
    target: Annotated[float | None, typer.Option(help="value of the metric to reach [the job's]")] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="allowed difference of synchronous rows; wide ReLU layers need more [0.0001]"),
    ] = None,
    warmup: Annotated[int | None, typer.Option(help="steps to leave out of speeds [a tenth]")] = None,
    threads: Annotated[int | None, typer.Option(help="PyTorch threads per process [cores / workers]")] = None,
    rate: Annotated[str | None, typer.Option(help="of host links, such as 1gbit,200mbit [no links]")] = None,
    latency: Annotated[str | None, typer.Option(help="of host links, such as 5ms [0]")] = None,
    jitter: Annotated[str | None, typer.Option(help="of the latency, such as 1ms [0]")] = None,
    compute: Annotated[
        str | None, typer.Option(help="emulated compute time of a step, as on a GPU, such as 50ms")
    ] = None,
    straggler: Annotated[
        str | None, typer.Option(help="slow workers, KIND:SECONDS (constant, pareto or host): pareto:20ms")
    ] = None,
    straggler_ranks: Annotated[
        str | None, typer.Option(help="ranks of the slow workers, comma-separated [all]")
    ] = None,
    kill: Annotated[
        str | None,
        typer.Option(help="kill a process before a step: 1@100 (worker 1), shard0@100 [none]"),
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="limit of one run in seconds [600]")] = None,
    alone: Annotated[bool, typer.Option("--alone", help="ignore any launcher; run on this host")] = False,
    out: Annotated[Path | None, typer.Option(help="folder to write or resume [results/DATE]")] = None,
) -> None:
    """Train, judge and measure. The last line holds the path of the report.

    With the --out of an interrupted comparison it runs only what is missing.

    Under srun, torchrun or another launcher, each task is one worker. --out must then be a shared folder.

    Exits with 1 if synchronous rows disagree.
    """
    flags = dict(locals())
    source, folder, here = flags.pop("experiment"), flags.pop("out"), flags.pop("alone")
    raise SystemExit(_run(source, flags, folder, here))


def _run(source: str | None, flags: dict[str, Any], out: Path | None, alone: bool) -> int:
    folder = out or Path("results") / f"{datetime.now():%Y-%m-%d-%H%M%S}"
    code = terminal.conclude("ps-compare", lambda: _compare(source, flags, out, folder, alone))
    if code > 128 and _is_first(alone):
        print(f"ps-compare: to resume, run: {resume_command(typed(), folder)}", file=sys.stderr)
    return code


def _is_first(alone: bool) -> bool:
    """Whether this process prints for all tasks of a cluster."""
    place = _place(alone)
    return place is None or place.rank == 0


def _place(alone: bool) -> Task | None:
    from hubring.ps.config.environment import environment
    from hubring.workers.compare.cluster import task

    return None if alone else task.find(environment())


def _compare(
    source: str | None, flags: dict[str, Any], out: Path | None, folder: Path, alone: bool
) -> dict[str, Any]:
    from hubring.ps.core.extras import require_for_job
    from hubring.workers.compare.cluster import task
    from hubring.workers.compare.experiment.experiment_file import load

    chosen = None if flags["job"] is not None or flags["script"] is not None else DEFAULT
    experiment = load(source or chosen, flags)  # before the slow import of torch, to fail fast
    require_for_job(experiment.job)  # before processes start: each worker would fail on its own
    place = _place(alone)
    if place is None:
        found = _here(experiment, folder)
    else:
        folder = task.check(experiment, place, out)
        if place.rank > 0:
            from hubring.workers.compare.cluster.follower import follow

            return follow(place, folder)
        found = _on_cluster(experiment, folder, place)

    from hubring.workers.compare.output.screen import show

    show(found, folder / "report.html")
    return _result(found, folder)


def _here(experiment: Experiment, folder: Path) -> Findings:
    """Runs everything on this machine."""
    from hubring.workers.compare.comparison import Comparison
    from hubring.workers.compare.cost.calibrate.calibration import calibrate
    from hubring.workers.compare.experiment.plan import runs
    from hubring.workers.compare.hardship import hosts
    from hubring.workers.compare.output.screen import Screen
    from hubring.workers.compare.run.child_reaper_start import Lifeline
    from hubring.workers.compare.run.runner import Runner

    comparison = Comparison.begin(experiment, folder, typed())
    for missing in comparison.missing:
        hosts.check(missing.setting)  # before the calibration, which takes a minute
    with Lifeline() as lifeline, Screen(runs(experiment)) as screen:
        # With NCCL nothing is predicted.
        measure = partial(calibrate, report=screen.calibrating) if experiment.backend == "gloo" else None
        return comparison.run(Runner(experiment, lifeline), screen, measure)


def _on_cluster(experiment: Experiment, folder: Path, task: Task) -> Findings:
    """Runs it as rank 0 of a cluster, without predictions: one machine's constants do not fit a cluster."""
    from hubring.workers.compare.cluster.conductor import conduct
    from hubring.workers.compare.comparison import Comparison
    from hubring.workers.compare.experiment.plan import runs
    from hubring.workers.compare.output.screen import Screen
    from hubring.workers.compare.run.child_reaper_start import Lifeline
    from hubring.workers.compare.run.runner import Runner

    with conduct(task, folder) as site:
        comparison = Comparison.begin(experiment, folder, typed(), site.machine)
        with Lifeline() as lifeline, Screen(runs(experiment)) as screen:
            found = comparison.run(Runner(experiment, lifeline, site), screen)
        site.code = _exit_code(found)
        return found


def _result(found: Findings, folder: Path) -> dict[str, Any]:
    """Returns the result for the last line."""
    rows = [
        {
            "setting": row.setting,
            "row": row.row,
            "withheld": row.withheld,
            **{name: None if each is None else _one(name, each) for name, each in row.numbers.items()},
        }
        for row in found.rows
    ]
    return {
        "report": str(folder / "report.html"),
        "results": str(folder / "results.json"),
        "rows": rows,
        "gate": {"passed": found.gate.passed, "pairs": len(found.gate.pairs)},
        "answer": found.answer,
        "verdict": found.verdict,
        "exit_code": _exit_code(found),
    }


def _one(name: str, number: Number) -> float:
    """Returns the median of all seeds, or the largest value for a figure whose worst case counts."""
    from hubring.workers.compare.result.numbers import WORST

    return number.most if name in WORST else number.median


def _exit_code(found: Findings) -> int:
    return 0 if found.gate.passed else 1

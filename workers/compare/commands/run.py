"""`ps-compare run`: trains, judges, measures, reports; or goes on where it was interrupted."""

from __future__ import annotations

import sys
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hubring.ps.config import terminal
from hubring.workers.compare.command import going_on, typed

if TYPE_CHECKING:
    from hubring.workers.compare.cluster.task import Task
    from hubring.workers.compare.experiment.experiment import Experiment
    from hubring.workers.compare.result.findings import Findings, Number

DEFAULT = "digits"
"""The experiment that ships and is run where none is named."""


def run(
    experiment: Annotated[
        str | None,
        typer.Argument(help="TOML file, or the name of one that ships: see ps-compare list [digits]"),
    ] = None,
    job: Annotated[str | None, typer.Option(help="a job that ships: digits or char-lm")] = None,
    script: Annotated[Path | None, typer.Option(help="a training script of your own; needs --metric")] = None,
    arguments: Annotated[
        str | None, typer.Option(help="for the job or script; {seed} {batch} {lr} {epochs} are filled in")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="which key of hubring.report() is the measure")] = None,
    rows: Annotated[
        str | None, typer.Option(help="ways to train, by comma: see ps-compare list [the experiment's]")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="by comma [0,1,2]")] = None,
    repeats: Annotated[int | None, typer.Option(help="runs with the same seed [1]")] = None,
    workers: Annotated[str | None, typer.Option(help="processes that share the batch, by comma [2]")] = None,
    servers: Annotated[str | None, typer.Option(help="shard processes of the hub, by comma [1]")] = None,
    transport: Annotated[str | None, typer.Option(help="to the hub: auto, shm, zmq or grpc [auto]")] = None,
    backend: Annotated[str | None, typer.Option(help="of the ring: gloo or nccl [gloo]")] = None,
    batch: Annotated[int | None, typer.Option(help="samples a step over all workers [the job's]")] = None,
    lr: Annotated[
        str | None,
        typer.Option(help="of the learning rate: same, linear or per-worker [same]"),
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="before --lr changes it [the job's]")] = None,
    epochs: Annotated[int | None, typer.Option(help="passes over the data [the job's]")] = None,
    target: Annotated[float | None, typer.Option(help="value of the measure to reach [the job's]")] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="how far synchronous rows may be apart; wide ReLU layers want more [0.0001]"),
    ] = None,
    warmup: Annotated[int | None, typer.Option(help="steps that count for no speed [a tenth]")] = None,
    threads: Annotated[int | None, typer.Option(help="of PyTorch in every process [cores / workers]")] = None,
    rate: Annotated[str | None, typer.Option(help="of hosts' links, as 1gbit,200mbit [no links]")] = None,
    latency: Annotated[str | None, typer.Option(help="of hosts' links, as 5ms [0]")] = None,
    jitter: Annotated[str | None, typer.Option(help="of that latency, as 1ms [0]")] = None,
    compute: Annotated[
        str | None, typer.Option(help="every step computes so long, as on a GPU: 50ms")
    ] = None,
    straggler: Annotated[
        str | None, typer.Option(help="slow workers: KIND:SECONDS, as pareto:20ms; constant, pareto or host")
    ] = None,
    straggler_ranks: Annotated[
        str | None, typer.Option(help="which of them are slow, by comma [all]")
    ] = None,
    kill: Annotated[
        str | None, typer.Option(help="kill a worker: RANK@STEP, as 1@100, before that of its steps [nobody]")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="seconds that one run may take [600]")] = None,
    alone: Annotated[bool, typer.Option("--alone", help="here, whatever launcher started this")] = False,
    out: Annotated[Path | None, typer.Option(help="folder to write to or go on in [results/DATE]")] = None,
) -> None:
    """Train, judge, measure; the report's path is in the last line.

    Started again with the same --out it finishes what is missing and repeats nothing.

    Under srun, torchrun or another launcher each task is one worker; --out is a folder that all share.

    Ends with 1 where synchronous rows disagree.
    """
    flags = dict(locals())
    source, folder, here = flags.pop("experiment"), flags.pop("out"), flags.pop("alone")
    raise SystemExit(_run(source, flags, folder, here))


def _run(source: str | None, flags: dict[str, Any], out: Path | None, alone: bool) -> int:
    folder = out or Path("results") / f"{datetime.now():%Y-%m-%d-%H%M%S}"
    code = terminal.conclude("ps-compare", lambda: _compare(source, flags, out, folder, alone))
    if code > 128 and _is_first(alone):
        print(f"ps-compare: to go on: {going_on(typed(), folder)}", file=sys.stderr)
    return code


def _is_first(alone: bool) -> bool:
    """Whether no other task of a cluster tells as much."""
    place = _place(alone)
    return place is None or place.rank == 0


def _place(alone: bool) -> Task | None:
    from hubring.ps.config.environment import environment
    from hubring.workers.compare.cluster import task

    return None if alone else task.find(environment())


def _compare(
    source: str | None, flags: dict[str, Any], out: Path | None, folder: Path, alone: bool
) -> dict[str, Any]:
    from hubring.workers.compare.cluster import task
    from hubring.workers.compare.experiment.experiment_file import load

    chosen = None if flags["job"] is not None or flags["script"] is not None else DEFAULT
    experiment = load(source or chosen, flags)  # before torch is imported: a wrong word is told at once
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
    """Runs all of it on this machine."""
    from hubring.workers.compare.comparison import Comparison
    from hubring.workers.compare.cost.calibrate.calibration import calibrate
    from hubring.workers.compare.experiment.plan import runs
    from hubring.workers.compare.hardship import hosts
    from hubring.workers.compare.output.screen import Screen
    from hubring.workers.compare.run.child_reaper_start import Lifeline
    from hubring.workers.compare.run.runner import Runner

    comparison = Comparison.begin(experiment, folder, typed())
    for missing in comparison.missing:
        hosts.check(missing.setting)  # rather than after a minute's calibration
    labels = [run.label for run in runs(experiment)]
    with Lifeline() as lifeline, Screen(labels) as screen:
        measure = partial(calibrate, tell=screen.calibrating)
        return comparison.run(Runner(experiment, lifeline), screen, measure)


def _on_cluster(experiment: Experiment, folder: Path, task: Task) -> Findings:
    """Conducts it. Nothing is predicted: the constants of one machine say nothing of what joins several."""
    from hubring.workers.compare.cluster.conductor import conduct
    from hubring.workers.compare.comparison import Comparison
    from hubring.workers.compare.experiment.plan import runs
    from hubring.workers.compare.output.screen import Screen
    from hubring.workers.compare.run.child_reaper_start import Lifeline
    from hubring.workers.compare.run.runner import Runner

    labels = [run.label for run in runs(experiment)]
    with conduct(task, folder) as site:
        comparison = Comparison.begin(experiment, folder, typed(), site.machine)
        with Lifeline() as lifeline, Screen(labels) as screen:
            found = comparison.run(Runner(experiment, lifeline, site), screen)
        site.code = _exit_code(found)
        return found


def _result(found: Findings, folder: Path) -> dict[str, Any]:
    """For the last line."""
    told = [
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
        "rows": told,
        "gate": {"passed": found.gate.passed, "pairs": len(found.gate.pairs)},
        "verdict": found.verdict,
        "exit_code": _exit_code(found),
    }


def _one(name: str, number: Number) -> float:
    """What is told of all seeds' values: the median, or the greatest where that is the worst."""
    from hubring.workers.compare.result.numbers import WORST

    return number.most if name in WORST else number.median


def _exit_code(found: Findings) -> int:
    return 0 if found.gate.passed else 1

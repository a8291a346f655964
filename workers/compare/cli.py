"""`ps-compare`: trains one job with several topologies, checks that they agree and compares their speed.

Only typer is imported here, so that `--help` is fast; each command imports what it needs when it runs.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hubring.ps.config import terminal
from hubring.workers.compare.plan.run_order import resume_command, typed
from hubring.workers.compare.predict import cli as cost

if TYPE_CHECKING:
    from hubring.workers.compare.findings import Findings
    from hubring.workers.compare.plan.experiment import Experiment
    from hubring.workers.compare.run.meeting import LauncherTask
    from hubring.workers.compare.statistics import Number


@terminal.concludes("ps-compare")
def show_list(
    folder: Annotated[Path, typer.Argument(help="folder of results [results]")] = Path("results"),
) -> dict[str, Any]:
    """List rows, jobs, built-in experiments and results."""
    from hubring.ps.config.sources import read_toml
    from hubring.workers.compare.plan.experiment import JOBS
    from hubring.workers.compare.plan.experiment_file import shipped
    from hubring.workers.compare.plan.row import EVERY

    results = {path.parent.name: _state(path.parent) for path in sorted(folder.glob("*/experiment.json"))}
    parts: dict[str, dict[str, str]] = {
        "rows": {
            row.name: "; ".join(filter(None, [row.about, row.peer.missing() if row.peer else ""]))
            for row in EVERY.values()
        },
        "jobs": {job.name: f"measured by {job.title}" for job in JOBS.values()},
        "experiments": {name: read_toml(path).get("about", "") for name, path in shipped().items()},
        f"results in {folder}": results,
    }
    for title, entries in parts.items():
        print(f"\n{title}", file=sys.stderr)
        for name, about in (entries or {"none": ""}).items():
            print(f"  {name:<22} {about}".rstrip(), file=sys.stderr)
    return {**{title.partition(" ")[0]: list(entries) for title, entries in parts.items()}, "exit_code": 0}


def _state(folder: Path) -> str:
    finished = len(list(folder.glob("runs/*/outcome.json")))
    if (folder / "results.json").is_file():
        return f"finished, {finished} runs"
    try:
        command = json.loads((folder / "experiment.json").read_text())["command"]
    except (ValueError, KeyError, TypeError) as cause:
        return f"experiment.json is damaged ({cause})"
    return f"not finished, {finished} runs so far; to resume, run: {resume_command(command, folder)}"


@terminal.concludes("ps-compare")
def report(
    folder: Annotated[Path, typer.Argument(help="folder of a comparison (--out)")],
    tolerance: Annotated[
        float | None, typer.Option(help="allowed difference of synchronous rows [that of the runs]")
    ] = None,
) -> dict[str, Any]:
    """Write results.json and the report again, without training."""
    from hubring.workers.compare.comparison import Comparison
    from hubring.workers.compare.show.screen import show

    comparison = Comparison.open(folder)
    if tolerance is not None:
        comparison = comparison.judged_by(tolerance)
    found = comparison.report(lambda run: print(f"checking the steps of {run}", file=sys.stderr))
    show(found, folder / "report.html")
    return {
        "report": str(folder / "report.html"),
        "results": str(folder / "results.json"),
        "verdict": found.verdict,
        "exit_code": 0,
    }


@terminal.concludes("ps-compare")
def timeline(
    folder: Annotated[Path, typer.Argument(help="folder of --trace; copy the files of all hosts into it")],
    out: Annotated[Path | None, typer.Option(help="file to write [FOLDER/trace.json]")] = None,
) -> dict[str, Any]:
    """Merge traces into one timeline for Perfetto, on the coordinator's clock."""
    from msgspec import to_builtins

    from hubring.ps.core.errors import UsageError
    from hubring.workers.compare.run.timeline import merge

    out = out or folder / "trace.json"
    merged = merge(folder, out)
    if merged.processes == 0:
        raise UsageError(f"{folder} holds no NAME.trace.json with events; use the folder given with --trace")
    clocks = to_builtins(merged.clocks)
    return {"timeline": str(out), "processes": merged.processes, "clocks": clocks, "exit_code": 0}


DEFAULT = "digits"
"""The built-in experiment that runs by default."""


FLAGS: tuple[tuple[str, type, str], ...] = (
    ("job", str, "built-in job: digits or char-lm"),
    ("script", Path, "your training script; needs --metric or --metric-regex"),
    ("arguments", str, "for the job or script; {seed} {batch} {lr} {epochs} are filled in"),
    ("metric", str, "key of hubring.report() to compare"),
    ("metric_regex", str, r"finds the metric in the script's output instead, such as 'loss (\S+)'"),
    ("samples_per_step", int, "of all workers, if the script does not report them [as the model gets]"),
    ("rows", str, "ways to train, comma-separated, see ps-compare list [experiment's]"),
    ("seeds", str, "comma-separated; 0 is one seed [0,1,2]"),
    ("repeats", int, "runs with the same seed [1]"),
    ("workers", str, "numbers of workers, comma-separated [2]"),
    ("servers", str, "numbers of hub shards, comma-separated [1]"),
    ("transport", str, "of the hub: auto, shm, zmq, grpc, zmq-tcp or grpc-tcp [auto]"),
    ("backend", str, "of torch's rows: gloo or nccl, then of rings too [gloo]"),
    ("batch", int, "samples per step over all workers [the job's]"),
    ("lr", str, "scaling of the learning rate: same, linear or per-worker [same]"),
    ("learning_rate", float, "before --lr scales it [the job's]"),
    ("epochs", int, "passes over the data [the job's]"),
    ("target", float, "value of the metric to reach [the job's]"),
    ("tolerance", float, "allowed difference of synchronous rows; wide ReLU layers need more [0.0001]"),
    ("warmup", int, "steps to leave out of speeds [a tenth]"),
    ("threads", int, "PyTorch threads per process [cores / workers]"),
    ("rate", str, "of host links, such as 1gbit,200mbit [no links]"),
    ("latency", str, "of host links, such as 5ms [0]"),
    ("jitter", str, "of the latency, such as 1ms [0]"),
    ("workers_per_host", int, "workers that share a host and its link [1]"),
    ("compute", str, "emulated compute time of a step, as on a GPU, such as 50ms"),
    ("kill", str, "kill a process before a step: 1@100 (worker 1), shard0@100 [none]"),
    ("timeout", float, "limit of one run in seconds [600]"),
)
"""Flags that change the experiment: name, type and help."""


@terminal.takes((terminal.option(*each) for each in FLAGS), cost.SLOW)
def run(
    experiment: Annotated[
        str | None,
        typer.Argument(help="TOML file or name of a built-in experiment, see ps-compare list [digits]"),
    ] = None,
    alone: Annotated[bool, typer.Option("--alone", help="ignore any launcher; run on this host")] = False,
    out: Annotated[Path | None, typer.Option(help="folder to write or resume [results/DATE]")] = None,
    **flags: object,
) -> None:
    """Train, judge and measure. The last line holds the path of the report.

    With the --out of an interrupted comparison it runs only what is missing.

    Rows ddp and ddp-hub train a DistributedDataParallel script without edits: name its --rows and
    --metric-regex.

    Under srun, torchrun or another launcher, each task is one worker. --out must then be a shared folder.

    Exits with 1 if a row's speed is withheld, or a run diverged or crashed.
    """
    folder = out or Path("results") / f"{datetime.now():%Y-%m-%d-%H%M%S}"
    code = terminal.conclude("ps-compare", lambda: _compare(experiment, flags, out, folder, alone))
    if code > 128 and ((place := _place(alone)) is None or place.rank == 0):  # once for a cluster
        print(f"ps-compare: to resume, run: {resume_command(typed(), folder)}", file=sys.stderr)
    raise SystemExit(code)


def _place(alone: bool) -> LauncherTask | None:
    from hubring.ps.config.environment import environment
    from hubring.workers.compare.run import meeting

    return None if alone else meeting.find_task(environment())


def _compare(
    source: str | None, flags: dict[str, object], out: Path | None, folder: Path, alone: bool
) -> dict[str, Any]:
    from hubring.ps.core.packages import require_for_job
    from hubring.workers.compare.plan.experiment_file import load_experiment
    from hubring.workers.compare.run import meeting

    chosen = None if flags["job"] is not None or flags["script"] is not None else DEFAULT
    experiment = load_experiment(source or chosen, flags)  # before the slow import of torch, to fail fast
    require_for_job(experiment.job)  # before processes start: each worker would fail on its own
    if (place := _place(alone)) is not None:
        folder = meeting.check_experiment(experiment, place, out)
        if place.rank > 0:
            from hubring.workers.compare.run.follower import follow

            return follow(place, folder)

    from hubring.workers.compare.show.screen import show

    found = _run(experiment, folder, place)
    show(found, folder / "report.html")
    return _result(found, folder)


def _run(experiment: Experiment, folder: Path, task: LauncherTask | None) -> Findings:
    """Runs everything on this machine, or as rank 0 of a cluster."""
    from hubring.workers.compare.comparison import Comparison
    from hubring.workers.compare.plan.run_order import runs
    from hubring.workers.compare.predict.calibrate import calibrate
    from hubring.workers.compare.run.conductor import conduct
    from hubring.workers.compare.run.runner import Runner
    from hubring.workers.compare.run.site import ThisMachine, check_link
    from hubring.workers.compare.show.screen import RunScreen
    from hubring.workers.peers.fork_server import ForkServers
    from hubring.workers.peers.processes import Lifeline

    with ExitStack() as stack:
        cluster = None if task is None else stack.enter_context(conduct(task, folder))
        machines = None if cluster is None else cluster.machine
        comparison = Comparison.begin(experiment, folder, typed(), machines)
        for missing in comparison.missing if cluster is None else ():
            check_link(missing.setting)  # before the calibration, which takes a minute
        planned = runs(experiment)
        lifeline, screen = stack.enter_context(Lifeline()), stack.enter_context(RunScreen(planned))
        # Nothing is predicted with NCCL, or on a cluster, which one machine's constants do not fit. A single
        # setting would calibrate its own rows.
        several = len({run.setting for run in planned}) > 1
        predicts = cluster is None and experiment.backend == "gloo" and several
        measure = partial(calibrate, report=screen.calibrating) if predicts else None
        # All programs are forks, or none is: their memory is compared.
        apart = any(run.setting.link or (run.row.peer and run.row.peer.needs) for run in planned)
        forks = None if experiment.script or apart else stack.enter_context(ForkServers())
        site = cluster or ThisMachine(forks)
        found = comparison.run(Runner(experiment, lifeline, site), screen, measure)
        if cluster is not None:
            cluster.code = _exit_code(found)
        return found


def _result(found: Findings, folder: Path) -> dict[str, Any]:
    """Returns the result for the last line: the median of all seeds, or the largest if the worst counts."""
    from hubring.workers.compare.statistics import NUMBERS

    def one(name: str, number: Number | None) -> float | None:
        return None if number is None else number.most if NUMBERS[name].worst else number.median

    rows = [
        {
            "setting": row.setting,
            "row": row.row,
            "withheld": row.withheld,
            "failed": row.failed,
            **{name: one(name, each) for name, each in row.numbers.items()},
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


def _exit_code(found: Findings) -> int:
    from hubring.workers.compare.decide.decision import lost

    return int(not found.gate.passed or bool(lost(found)) or any(row.withheld for row in found.rows))


app = typer.Typer(
    help="Compare topologies on one job: check that they agree, then measure their speed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def program(version: Annotated[bool, terminal.version_option()] = False) -> None:
    """Takes the options in front of a command."""


app.command()(run)
app.command()(report)
app.command("list")(show_list)
app.command()(timeline)
app.command()(cost.calibrate)
app.command()(cost.predict)


def main() -> None:
    """Run `ps-compare`."""
    terminal.unwind_on_sigterm()
    terminal.run(app, "ps-compare")


if __name__ == "__main__":
    main()

"""Results for other tools: TensorBoard scalars, one folder per run, and MLPerf's log."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

from hubring.ps.core.packages import missing
from hubring.workers.compare.measure import Numbers
from hubring.workers.compare.plan.experiment import Experiment, JobMetric
from hubring.workers.compare.run.outcome import RunOutcome


def lacks_tensorboard() -> str:
    """Returns why `write` writes nothing; empty if it does."""
    text = missing("tensorboard")
    return f"no TensorBoard scalars: {text}" if text else ""


def write_scalars(folder: Path, outcomes: Iterable[RunOutcome], metric: str) -> None:
    """Writes what every rank 0 reported: `loss`, `test_loss` and the metric; nothing without TensorBoard.

    Args:
        folder: Replaced if it exists.
        outcomes: The runs.
        metric: Key of the metric.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if lacks_tensorboard():
        return
    from torch.utils.tensorboard import SummaryWriter  # late: an extra

    for outcome in outcomes:
        began = datetime.fromisoformat(outcome.began).timestamp()
        with SummaryWriter(str(folder / outcome.run.label)) as writer:
            for line in outcome.records[0]:
                for name in {"loss", "test_loss", metric} & line.keys():
                    writer.add_scalar(name, line[name], line["step"], began + line["seconds"])


Event = dict[str, object]


def write_mllog(experiment: Experiment, measured: Iterable[tuple[RunOutcome, Numbers]]) -> str:
    """Returns the whole file: every run from `run_start` to `run_stop`.

    Args:
        experiment: The experiment.
        measured: Every run with its numbers.
    """
    job = experiment.yardstick
    events = [event for outcome, numbers in measured for event in _events(experiment, job, outcome, numbers)]
    return "".join(f":::MLLOG {json.dumps(event)}\n" for event in events)


def _events(experiment: Experiment, job: JobMetric, outcome: RunOutcome, numbers: Numbers) -> Iterator[Event]:
    run = outcome.run

    def event(time_ms: float, key: str, value: object, kind: str = "POINT_IN_TIME", **more: object) -> Event:
        about = {"label": run.label, "row": run.row.name, **more}
        event = {"namespace": "", "time_ms": round(time_ms), "event_type": kind}
        return {**event, "key": key, "value": value, "metadata": about}

    start = 1e3 * datetime.fromisoformat(outcome.began).timestamp()
    yield event(start, "submission_benchmark", job.name)
    yield event(start, "seed", run.seed)
    if experiment.batch is not None:
        yield event(start, "global_batch_size", experiment.batch)
    rate = experiment.rate_for(run.row, run.setting.workers) or job.learning_rate
    if rate is not None:
        yield event(start, "opt_base_learning_rate", rate)
    # The wall-clock time of the record's zero is not recorded; it is derived from the length of the run.
    last = max(line["seconds"] for line in outcome.records[0])
    zero = start + 1e3 * max(0.0, outcome.seconds - last)
    yield event(zero, "run_start", None, "INTERVAL_START")
    for line in outcome.records[0]:
        if job.metric in line:
            where = {"epoch_num": line.get("epoch"), "step_num": line["step"]}
            yield event(zero + 1e3 * line["seconds"], "eval_accuracy", line[job.metric], **where)
    status = "success" if numbers["seconds_to_target"] is not None else "aborted"
    yield event(zero + 1e3 * last, "run_stop", None, "INTERVAL_END", status=status)

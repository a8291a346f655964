"""From the reports of a run to numbers. Each number is defined here and measured, never assumed.

- steady steps: steps after warm-up (the first tenth, at least five, unless the experiment sets `warmup`).
  Steps are left out if they follow a measurement of the model, for which other ranks can have waited, or if
  they include or follow the saving of parameters after the first `EARLY` steps, or record other elements
  (`hubring.workers.audit.rotating_elements`), which takes longer on a hub.
- step_ms: median time from the report before a steady step to its own report, over all ranks. step_mean_ms:
  mean of each rank, then over ranks. compute_ms and exposed_ms are parts of the mean.
- samples_per_second: samples of a rank's steady steps / their time, summed over the ranks that were not
  killed. A mean, because without waiting a median hides ranks that stood still.
- seconds: on rank 0's clock since the end of its first step, which includes waiting for all ranks to start
  and one-time costs; measuring the model counts. seconds_to_target, samples_to_target: until the metric first
  meets the target. Samples are those of all workers up to then; if workers do not step together, each
  worker's time starts at the end of its own first step.
- bytes_sent_per_step, bytes_received_per_step: all bytes of a worker / its steps; mean over workers.
- exposed_ms, hidden_ms: time of a steady step that waits for exchange without computing, and exchange time
  that overlaps with compute; mean over these steps, then over workers. compute_ms: the rest of a steady step,
  on average. None if parameters are on a GPU: the host cannot tell the exchange from the GPU's own work.
- queue_ms, apply_ms, read_wait_ms: time of a push in a shard's queue behind others that arrived with it; time
  to read, apply and answer it; time for which its answer was held back by the mode, which waits for other
  workers. Mean over pushes.
- pause_seconds: after a process was killed, the longest time between two reports of a worker that goes on,
  less its median step; the maximum over workers. lost_steps: steps that rank 0 took again, because their
  results were lost.
- staleness: updates by other workers between a worker's read and its own update; mean over pushes, then over
  workers, and the maximum of all.
- memory_mb: peak resident memory of a worker. cpu_ms_per_step: processor time of a worker / its steps. Mean
  over workers.
- record_ms: time that the gate's record takes / steps of a worker; mean over workers. It is part of a step.
- price_per_epoch, price_to_target: hours x the prices of all hosts.
- final_loss and final_metric: rank 0's on the test data after all gradients are applied; None if the last
  value is not finite, whatever the earlier ones.

What was not measured is None, never 0. A run that diverged has no numbers, because no gate checks it. One of
which reports are missing (`lacking`) has none either: its steps would seem longer than they are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise, product
from statistics import fmean, median
from typing import Any

from hubring.ps.core.errors import HubringError, UsageError
from hubring.workers.audit.rotating_elements import is_due
from hubring.workers.compare.plan.experiment import JobMetric, PricesTable
from hubring.workers.compare.plan.run_order import PlannedRun
from hubring.workers.compare.plan.setting import Fault
from hubring.workers.compare.run.outcome import EARLY, NOT_FINITE, Line, RunOutcome
from hubring.workers.compare.statistics import NUMBERS

Numbers = dict[str, float | None]

REPORTED = 0.9
"""Smallest share of the steps that must be reported. A script may leave out a step at the end of an epoch."""


def measure(outcome: RunOutcome, job: JobMetric, warmup: int | None = None) -> Numbers:
    """Measures one run.

    Args:
        outcome: The run's outcome.
        job: The metric and its target.
        warmup: Steps to leave out of speeds; None: a tenth, at least five.

    Returns:
        A number or None for each of `NAMES`.

    Raises:
        UsageError: A reported value is not a number.
    """
    numbers: Numbers = dict.fromkeys(NUMBERS)
    if outcome.diverged:
        return numbers
    _check_types(outcome, job)
    if lacking(outcome, job):
        return numbers
    numbers |= _speed(outcome, job, warmup) | _progress(outcome, job)
    numbers |= _of_workers(outcome) | _of_shards(outcome)
    if outcome.run.setting.fault is not None:
        numbers |= _of_loss(outcome, outcome.run.setting.fault)
    return numbers


def staleness(outcome: RunOutcome) -> Counter[str]:
    """Returns the number of pushes by staleness, over all workers; empty if it was not counted."""
    counts: Counter[str] = Counter()
    for result in _present(outcome):
        counts.update(result.get("exchange", {}).get("staleness", {}))
    return counts


def taken_by(outcome: RunOutcome) -> list[int]:
    """Returns the steps that each rank took; 0 if that is not recorded."""
    known = [result or {} for result in outcome.results]
    return [each.get("steps", 0) - each.get("resumed_at", 0) for each in known]


def steps_of(record: Iterable[Line]) -> list[Line]:
    """Returns the reports of steps."""
    return [line for line in record if "samples" in line]


def began(outcome: RunOutcome) -> float:
    """Returns zero of all seconds, on the clock of rank 0's record."""
    zero: float = steps_of(outcome.records[0])[0]["seconds"]
    return zero


def seen(outcome: RunOutcome) -> list[int]:
    """Returns samples of all workers at each report of rank 0: by step if synchronous, else by time."""

    def places(record: Sequence[Line]) -> list[float]:
        """Returns the position of each report on a scale that all ranks share."""
        if outcome.run.row.synchronous:
            return [line["step"] for line in record]
        zero = steps_of(record)[0]["seconds"]
        return [line["seconds"] - zero for line in record]

    wanted, found = places(outcome.records[0]), [0] * len(outcome.records[0])
    for record in outcome.records:
        samples = list(accumulate((line.get("samples", 0) for line in record), initial=0))
        there = places(record)
        found = [before + samples[bisect_right(there, at)] for before, at in zip(found, wanted, strict=True)]
    return found


def check(outcome: RunOutcome, job: JobMetric) -> None:
    """Checks that a run can be measured.

    Raises:
        HubringError: Reports are missing.
        UsageError: A reported value is not a number.
    """
    _check_types(outcome, job)
    if not outcome.diverged and (why := lacking(outcome, job)):
        raise HubringError(f"{outcome.run.label}: {why}")


def lacking(outcome: RunOutcome, job: JobMetric) -> str:
    """Returns which reports a run lacks, and how to make them; empty if it lacks none."""
    advice = outcome.unseen or "call hubring.report(loss=..., samples=...) after every step"
    for rank, (record, taken) in enumerate(zip(outcome.records, taken_by(outcome), strict=True)):
        reported = len(steps_of(record))
        if reported < 2:
            return f"rank {rank} recorded fewer than two steps, so there is nothing to measure; {advice}"
        skips = outcome.run.setting.fault is not None or outcome.run.row.backup  # steps that it did not take
        if not (skips or outcome.unseen) and reported < REPORTED * taken:
            return f"rank {rank} took {taken} steps and reported {reported} of them; {advice}"
    if outcome.failed is None and not any(_reported(line, job.metric) for line in outcome.records[0]):
        return (
            f"rank 0 did not report {job.metric!r}, so there is nothing to compare;"
            f" call hubring.report({job.metric}=...) on rank 0, or print what --metric-regex finds"
        )
    return ""


def _check_types(outcome: RunOutcome, job: JobMetric) -> None:
    """Checks what is measured: only rank 0 tests; test metrics of other ranks are ignored."""
    label = outcome.run.label
    for rank, record in enumerate(outcome.records):
        names = ("samples", "loss") if rank else ("samples", "loss", "test_loss", job.metric)
        for line, name in product(record, names):
            value = line.get(name, 0)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(
                    f"{label}: rank {rank} reported {name} = {value!r} after step {line['step']};"
                    f" expected a number. Fix hubring.report({name}=...), delete {outcome.folder} and run"
                    " again"
                )


def _reported(line: Line, name: str) -> bool:
    """Whether a report contains this metric, finite or not."""
    return name in line or name in line.get(NOT_FINITE, ())


Steps = Sequence[tuple[Line, Line]]
"""Steps of a rank: the report before each, and its own."""


def _speed(outcome: RunOutcome, job: JobMetric, warmup: int | None) -> Numbers:
    measured = {line["step"] for line in outcome.records[0] if _reported(line, job.metric)}
    measured |= {EARLY - 1, EARLY}
    ranks = [_steady(record, measured, warmup) for record in outcome.records]
    seconds = [[line["seconds"] - before["seconds"] for before, line in steps] for steps in ranks]
    exposed, mean = _milliseconds(outcome, "exposed_seconds", ranks), 1e3 * fmean(map(fmean, seconds))
    return {
        "compute_ms": None if exposed is None else max(0.0, mean - exposed),
        "exposed_ms": exposed,
        "hidden_ms": _milliseconds(outcome, "hidden_seconds", ranks),
        "samples_per_second": sum(
            sum(line["samples"] for _, line in steps) / sum(took)
            for steps, took, result in zip(ranks, seconds, outcome.results, strict=True)
            if result is not None
        ),
        "step_ms": 1e3 * median(chain.from_iterable(seconds)),
        "step_mean_ms": mean,
    }


def _steady(record: Sequence[Line], measured: set[int], warmup: int | None) -> Steps:
    """Returns the steady steps; `measured` holds the steps after which rank 0 did something else."""
    steps = [(before, line) for before, line in pairwise(record) if "samples" in line]
    skipped = max(5, len(steps) // 10) if warmup is None else warmup
    warm = steps[min(skipped, len(steps) - 1) :]
    usual = [(before, line) for before, line in warm if not is_due(line["step"])]
    return [(before, line) for before, line in usual if line["step"] - 1 not in measured] or usual or warm


def _milliseconds(outcome: RunOutcome, name: str, ranks: Sequence[Steps]) -> float | None:
    """Returns by how much a count of seconds grows in a step, as the mean over steps and then over ranks.

    None if a report or a worker's last line has no such value, as for some peers.
    """
    lines = [result["exchange"].get(name) for result in _present(outcome)]
    if None in (*lines, *(line[name] for steps in ranks for step in steps for line in step)):
        return None
    return 1e3 * fmean(fmean(line[name] - before[name] for before, line in steps) for steps in ranks)


def _progress(outcome: RunOutcome, job: JobMetric) -> Numbers:
    """Returns when the target was reached, and the final values."""
    zero = began(outcome)
    finals = [line for line in outcome.records[0] if _reported(line, job.metric)]
    reports = zip(outcome.records[0], seen(outcome), strict=True)
    reached = [each for each in reports if job.metric in each[0] and job.reached(each[0][job.metric])]
    numbers: Numbers = {}
    for line, samples in reached[:1]:
        numbers["seconds_to_target"] = max(0.0, line["seconds"] - zero)
        numbers["samples_to_target"] = float(samples)
    if outcome.failed is None:
        last = finals[-1]
        numbers["seconds"] = last["seconds"] - zero
        numbers["final_loss"] = last.get("test_loss" if _reported(last, "test_loss") else "loss")
        numbers["final_metric"] = last.get(job.metric)
    return numbers


def _of_workers(outcome: RunOutcome) -> Numbers:
    exchanges = [result["exchange"] for result in _present(outcome)]
    on_hub = outcome.run.row.on_hub
    return {
        "bytes_sent_per_step": _per_step(outcome, "exchange", "bytes_sent"),
        "bytes_received_per_step": _per_step(outcome, "exchange", "bytes_received"),
        "staleness_mean": fmean(exchange["staleness_mean"] for exchange in exchanges) if on_hub else None,
        "staleness_max": max(exchange["staleness_max"] for exchange in exchanges) if on_hub else None,
        "memory_mb": one_of([result["usage"]["peak_bytes"] / 1e6 for result in _present(outcome)]),
        "cpu_ms_per_step": _per_step(outcome, "usage", "cpu_seconds", 1e3),
        "record_ms": _per_step(outcome, "audit", "seconds", 1e3),
    }


def _of_shards(outcome: RunOutcome) -> Numbers:
    """Returns the shards' mean times per push."""
    shards = (outcome.server or {}).get("shards") or []
    pushes = sum(shard.get("pushes", 0) for shard in shards)
    if not pushes:
        return {}
    held = sum(seconds for shard in shards for seconds in shard["held_seconds"].values())
    return {
        "queue_ms": 1e3 * sum(shard["queued_seconds"] for shard in shards) / pushes,
        "apply_ms": 1e3 * sum(shard["handled_seconds"] for shard in shards) / pushes,
        "read_wait_ms": 1e3 * held / pushes,
    }


def _of_loss(outcome: RunOutcome, fault: Fault) -> Numbers:
    """Returns how long training stood still after a process was killed, and what was lost."""
    pauses = []
    for rank, record in enumerate(outcome.records):
        if rank == fault.worker:
            continue
        steps = steps_of(record)
        seconds = [line["seconds"] - before["seconds"] for before, line in pairwise(steps)]
        after = [took for took, line in zip(seconds, steps[1:], strict=True) if line["step"] > fault.step]
        pauses += [max(after) - median(seconds)] if after else []
    again = [before["step"] + 1 - line["step"] for before, line in pairwise(steps_of(outcome.records[0]))]
    lost = sum(max(0, each) for each in again)
    return {"pause_seconds": max(0.0, *pauses) if pauses else None, "lost_steps": float(lost)}


def _present(outcome: RunOutcome) -> list[Mapping[str, Any]]:
    """Returns the last lines of workers that were not killed."""
    return [result for result in outcome.results if result and "exchange" in result]


def _per_step(outcome: RunOutcome, part: str, name: str, unit: float = 1.0) -> float | None:
    """Returns a number of the workers' last lines per step, as the mean over workers."""
    pairs = zip(outcome.results, outcome.records, strict=True)
    found = [(result.get(part, {}).get(name), record) for result, record in pairs if result]
    return one_of(
        [None if value is None else unit * value / len(steps_of(record)) for value, record in found]
    )


def one_of(
    values: Sequence[float | None], choose: Callable[[Sequence[float]], float] = fmean
) -> float | None:
    """Returns one value for several, by default their mean; None if one of them is None, or there is none."""
    known = [value for value in values if value is not None]
    return choose(known) if known and len(known) == len(values) else None


HOUR = 3600.0


def price(run: PlannedRun, numbers: Numbers, prices: PricesTable, epochs: int | None) -> Numbers:
    """Returns the prices of one run; None where its time is not known.

    Args:
        run: The run, which says how many hosts it needs.
        numbers: Its measured numbers.
        prices: Prices of a host for an hour.
        epochs: Epochs of the run; None: not known.
    """
    workers, servers = run.row.hosts(run.setting)
    second = (workers * prices.worker + servers * prices.server) / HOUR

    def of(seconds: float | None, parts: int | None = 1) -> float | None:
        return None if seconds is None or parts is None else second * seconds / parts

    return {
        "price_per_epoch": of(numbers["seconds"], epochs),
        "price_to_target": of(numbers["seconds_to_target"]),
    }

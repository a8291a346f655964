"""From the reports of a run to numbers, each defined here and measured, never assumed.

- steady steps: those after warm-up (the first tenth, at least five, unless the experiment says how
  many) that do not follow a measurement of the model, for which others may have waited, nor hold
  or follow the saving of parameters after the first `EARLY`.
- step_ms: median time from the report before a steady step to its own, over all ranks; step_mean_ms: the
  mean, of each rank and then over ranks. compute_ms and exposed_ms are parts of the mean.
- samples_per_second: samples of a rank's steady steps / the time that they took, summed over the ranks
  that were not killed; a mean, not a median: where nobody waits for anybody, the median step hides who
  stood still.
- seconds: on rank 0's clock since the end of its first step, which waits for everyone's start
  and pays for what is done once; measuring the model counts. seconds_to_target, samples_to_target:
  until the measure first was as good as the target; samples are those of all workers by then, each
  counted from the end of its own first step where workers do not step together.
- bytes_sent_per_step, bytes_received_per_step: by a worker from its start to its end / its steps;
  mean over workers.
- exposed_ms, hidden_ms: what a steady step waited for the exchange and computed nothing, and what of the
  exchange hid behind computing; mean over these steps, then over workers. compute_ms: what is left of a
  steady step, on average.
- queue_ms, apply_ms, read_wait_ms: how long a push stood in a shard behind others that came with it, what
  reading, applying and answering it took, and how long its answer was held back until the mode let it
  go, which is until others had come; mean over pushes.
- staleness: updates by others between a worker's read and its own update; its mean over pushes, then
  over workers, and the most of all.
- memory_mb: the most that a worker held resident; cpu_ms_per_step: processor time of a worker / its
  steps. Mean over workers.
- final_loss and final_metric: rank 0's on the test data, after all gradients are in; None where that
  last one is not finite, whatever came before.

What was not measured is None, never 0. Of a run that diverged nothing was: no gate has seen its parameters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise, product
from statistics import fmean, median
from typing import Any, NamedTuple

from hubring.ps.core.errors import HubringError, UsageError
from hubring.workers.compare.experiment.job import Job
from hubring.workers.compare.result.numbers import NAMES
from hubring.workers.compare.run.outcome import EARLY, NOT_FINITE, Line, Outcome

Numbers = dict[str, float | None]


def measure(outcome: Outcome, job: Job, warmup: int | None = None) -> Numbers:
    """Measures one run.

    Args:
        outcome: What the run left.
        job: Names the measure, and what is good enough.
        warmup: Steps that count for no speed; None: a tenth, at least five.

    Returns:
        A number, or None, for each of `NAMES`.

    Raises:
        HubringError: A record holds fewer than two steps, or rank 0's no measurement.
        UsageError: What should be a number is none.
    """
    numbers: Numbers = dict.fromkeys(NAMES)
    if outcome.diverged:
        return numbers
    _check(outcome, job)
    numbers |= _speed(outcome, job, warmup) | _progress(outcome, job)
    numbers |= _of_workers(outcome) | _of_shards(outcome)
    return numbers


def staleness(outcome: Outcome) -> Counter[str]:
    """How many pushes had which staleness, over all workers; empty where nobody counted."""
    counts: Counter[str] = Counter()
    for result in _present(outcome):
        counts.update(result.get("exchange", {}).get("staleness", {}))
    return counts


def steps_of(record: Iterable[Line]) -> list[Line]:
    """The reports that steps made."""
    return [line for line in record if "samples" in line]


def began(outcome: Outcome) -> float:
    """Zero of all seconds, on the clock of rank 0's record."""
    zero: float = steps_of(outcome.records[0])[0]["seconds"]
    return zero


def seen(outcome: Outcome) -> list[int]:
    """Samples of all workers by each report of rank 0: by its step where all step together, else its time."""

    def places(record: Sequence[Line]) -> list[float]:
        """Of each report, on the scale that all ranks have in common."""
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


def _check_numbers(outcome: Outcome, job: Job) -> None:
    """Of what is measured: rank 0 alone tests, and what others give under these names nobody reads."""
    for rank, record in enumerate(outcome.records):
        names = ("samples", "loss") if rank else ("samples", "loss", "test_loss", job.metric)
        for line, name in product(record, names):
            value = line.get(name, 0)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(
                    f"{outcome.run.label}: rank {rank} reported {name} = {value!r} after step {line['step']},"
                    f" expected a number: mend hubring.report({name}=...), delete {outcome.folder} and run"
                    " again"
                )


def _reported(line: Line, name: str) -> bool:
    """Whether a report has this metric, finite or not."""
    return name in line or name in line.get(NOT_FINITE, ())


def _check(outcome: Outcome, job: Job) -> None:
    _check_numbers(outcome, job)
    label = outcome.run.label
    if outcome.failed is None and not any(_reported(line, job.metric) for line in outcome.records[0]):
        raise HubringError(
            f"{label}: rank 0 reported no {job.metric!r}: nothing to compare;"
            f" call hubring.report({job.metric}=...) there"
        )
    if any(len(steps_of(record)) < 2 for record in outcome.records):
        raise HubringError(
            f"{label}: a worker recorded fewer than two steps: nothing to measure;"
            " call hubring.report(loss=..., samples=...) after every step"
        )
    if any("hidden_seconds" not in line for record in outcome.records for line in record):
        raise HubringError(
            f"{label} was recorded by an earlier version: delete {outcome.folder} and run again"
        )


class _Pace(NamedTuple):
    """A rank's steady steps.

    Attributes:
        samples: Of all of them.
        seconds: Of each.
        exposed: Seconds that exchanges took of one, on average.
        hidden: Seconds for which they were on their way behind computing, likewise; None: nobody counted.
    """

    samples: int
    seconds: list[float]
    exposed: float | None
    hidden: float | None


def _speed(outcome: Outcome, job: Job, warmup: int | None) -> Numbers:
    measured = {line["step"] for line in outcome.records[0] if _reported(line, job.metric)}
    measured |= {EARLY - 1, EARLY}
    paces = [_steady(record, measured, warmup) for record in outcome.records]
    exposed = _told(outcome, "exposed_seconds", [pace.exposed for pace in paces])
    mean = 1e3 * fmean(fmean(pace.seconds) for pace in paces)
    return {
        "compute_ms": None if exposed is None else max(0.0, mean - exposed),
        "exposed_ms": exposed,
        "hidden_ms": _told(outcome, "hidden_seconds", [pace.hidden for pace in paces]),
        "samples_per_second": sum(
            pace.samples / sum(pace.seconds)
            for pace, result in zip(paces, outcome.results, strict=True)
            if result is not None
        ),
        "step_ms": 1e3 * median(seconds for pace in paces for seconds in pace.seconds),
        "step_mean_ms": mean,
    }


def _steady(record: Sequence[Line], measured: set[int], warmup: int | None) -> _Pace:
    """What counts for speed; `measured` holds the steps after which rank 0 did something else."""
    steps = [(before, line) for before, line in pairwise(record) if "samples" in line]
    skipped = max(5, len(steps) // 10) if warmup is None else warmup
    warm = steps[min(skipped, len(steps) - 1) :]
    kept = [(before, line) for before, line in warm if line["step"] - 1 not in measured] or warm
    return _Pace(
        samples=sum(line["samples"] for _, line in kept),
        seconds=[line["seconds"] - before["seconds"] for before, line in kept],
        exposed=_growth(kept, "exposed_seconds"),
        hidden=_growth(kept, "hidden_seconds"),
    )


def _growth(steps: Sequence[tuple[Line, Line]], name: str) -> float | None:
    """By how much a count grew from the report before a step to its own, on average."""
    if any(line[name] is None for step in steps for line in step):
        return None
    return fmean(line[name] - before[name] for before, line in steps)


def _told(outcome: Outcome, name: str, seconds: Sequence[float | None]) -> float | None:
    """The mean in milliseconds, unless a worker's last line says that it cannot tell it, as some peers'."""
    told = all(result["exchange"].get(name) is not None for result in _present(outcome))
    mean = _mean(seconds) if told else None
    return None if mean is None else 1e3 * mean


def _progress(outcome: Outcome, job: Job) -> Numbers:
    """How far the model came, and when."""
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


def _of_workers(outcome: Outcome) -> Numbers:
    exchanges = [result["exchange"] for result in _present(outcome)]
    on_hub = outcome.run.row.on_hub
    return {
        "bytes_sent_per_step": _per_step(outcome, "exchange", "bytes_sent"),
        "bytes_received_per_step": _per_step(outcome, "exchange", "bytes_received"),
        "staleness_mean": fmean(exchange["staleness_mean"] for exchange in exchanges) if on_hub else None,
        "staleness_max": max(exchange["staleness_max"] for exchange in exchanges) if on_hub else None,
        "memory_mb": _mean([result["usage"]["peak_bytes"] / 1e6 for result in _present(outcome)]),
        "cpu_ms_per_step": _per_step(outcome, "usage", "cpu_seconds", 1e3),
    }


def _of_shards(outcome: Outcome) -> Numbers:
    """Shards count pushes, and the seconds that these waited and were worked on."""
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


def _present(outcome: Outcome) -> list[Mapping[str, Any]]:
    """The last lines of those that were not killed."""
    return [result for result in outcome.results if result and "exchange" in result]


def _per_step(outcome: Outcome, part: str, name: str, unit: float = 1.0) -> float | None:
    """A number of the workers' last lines by step, as the mean over workers."""
    pairs = zip(outcome.results, outcome.records, strict=True)
    found = [(result.get(part, {}).get(name), record) for result, record in pairs if result]
    return _mean([None if value is None else unit * value / len(steps_of(record)) for value, record in found])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None

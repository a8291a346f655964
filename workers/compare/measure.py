"""From the reports of a run to numbers, each defined here and measured, never assumed.

    step time         seconds from the report before a step to the step's own: what a rank does
                      between (measuring the model after an epoch) is left out
    warm-up           the first tenth of a rank's steps, at least five
    samples/s         sum over ranks of samples of a step / median step time after warm-up
    seconds to target rank 0's seconds, measurements included, at the first one that reached the target
    bytes a step      sent and received by a worker from its start to its end / its steps; mean over workers
    exposed ms        time that a step waited for the exchange and computed nothing; mean over workers
    staleness         updates by others between a worker's read and its own update; mean, and maximum
    final loss, measure  rank 0's, after all gradients are in
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import Any

from ps.errors import HubringError
from workers.compare.job import Job
from workers.compare.outcome import Line, Outcome
from workers.compare.row import Row


@dataclass(frozen=True, slots=True)
class Measure:
    """A row's numbers; units as in the names. `withheld` says why its speeds are not shown."""

    row: str
    synchronous: bool
    workers: int
    steps: int
    samples_per_second: float | None
    step_ms: float | None
    seconds_to_target: float | None
    seconds: float | None
    final_loss: float
    final_metric: float
    reached: bool
    bytes_per_step: float
    staleness_mean: float
    staleness_max: int
    exposed_ms_per_step: float | None
    withheld: str | None = None

    @property
    def on_hub(self) -> bool:
        return self.row.startswith("hub-")

    def as_json(self) -> dict[str, Any]:
        """The measure as a JSON object."""
        return asdict(self)


def measure(row: Row, outcome: Outcome, job: Job, target: float, withheld: str | None) -> Measure:
    """Measures one run.

    Args:
        row: Which way was run.
        outcome: What the run left.
        job: Names the measure.
        target: Value of the measure that counts as reached.
        withheld: Why no speed may be shown; None: it may.

    Raises:
        HubringError: A record holds no steps, or rank 0's no measurement.
    """
    steps = [steps_of(record) for record in outcome.records]
    finals = [line for line in outcome.records[0] if job.metric in line]
    if not finals or not all(steps):
        raise HubringError(f"{row.name}: a worker's record is empty; the job ended without training")
    reached = [line["seconds"] for line in finals if job.reached(line[job.metric], target)]
    paces = [_pace(record) for record in outcome.records]
    exchanges = [result["exchange"] for result in outcome.results]
    shown = withheld is None
    return Measure(
        row=row.name,
        synchronous=row.synchronous,
        workers=len(outcome.records),
        steps=len(steps[0]),
        samples_per_second=sum(samples / seconds for samples, seconds in paces) if shown else None,
        step_ms=1e3 * fmean(seconds for _, seconds in paces) if shown else None,
        seconds_to_target=reached[0] if reached and shown else None,
        seconds=outcome.records[0][-1]["seconds"] if shown else None,
        final_loss=finals[-1]["test_loss"],
        final_metric=finals[-1][job.metric],
        reached=bool(reached),
        bytes_per_step=fmean(
            (exchange["bytes_sent"] + exchange["bytes_received"]) / len(mine)
            for exchange, mine in zip(exchanges, steps, strict=True)
        ),
        staleness_mean=fmean(exchange["staleness_mean"] for exchange in exchanges),
        staleness_max=max(exchange["staleness_max"] for exchange in exchanges),
        exposed_ms_per_step=1e3
        * fmean(
            exchange["exposed_seconds"] / len(mine) for exchange, mine in zip(exchanges, steps, strict=True)
        )
        if shown
        else None,
        withheld=withheld,
    )


def steps_of(record: Iterable[Line]) -> list[Line]:
    """The reports that steps made."""
    return [line for line in record if "samples" in line]


def step_seconds(record: Sequence[Line]) -> list[float]:
    """Time of every step but one that begins the record, in seconds."""
    return [
        line["seconds"] - before["seconds"] for before, line in pairwise(record) if "samples" in line
    ]


def _pace(record: Sequence[Line]) -> tuple[float, float]:
    """Samples of this rank's step, and its median time in seconds after warm-up."""
    times = step_seconds(record)
    warm = times[min(max(5, len(times) // 10), len(times) - 1) :]
    return median(line["samples"] for line in steps_of(record)), median(warm)


def curves(outcome: Outcome, metric: str) -> dict[str, list[dict[str, float]]]:
    """How loss and measure fell or rose: points of `seconds`, `samples` and `value`.

    `loss` is the mean over ranks of each step's training loss, `metric` is rank
    0's measure. Samples are those of all workers, taken as rank 0's share times
    their number; seconds are rank 0's.
    """
    size, first = len(outcome.records), outcome.records[0]
    seen = list(accumulate(line.get("samples", 0) * size for line in first))
    losses = zip(*(steps_of(record) for record in outcome.records), strict=False)
    points = [(line, samples) for line, samples in zip(first, seen, strict=True) if "samples" in line]
    return {
        "loss": [
            {"seconds": line["seconds"], "samples": samples, "value": fmean(each["loss"] for each in ranks)}
            for (line, samples), ranks in zip(points, losses, strict=False)
        ],
        "metric": [
            {"seconds": line["seconds"], "samples": samples, "value": line[metric]}
            for line, samples in zip(first, seen, strict=True)
            if metric in line
        ],
    }

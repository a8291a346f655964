"""From the reports of a run to numbers, each defined here and measured, never assumed.

- steady steps: those after warm-up (the first tenth, at least five) that do not follow a
  measurement of the model, for which others may have waited.
- step ms: median time from the report before a steady step to its own, over all ranks.
- samples/s: samples of a rank's steady steps / the time that they took, summed over ranks;
  a mean, not a median: where nobody waits for anybody, the median step hides who stood still.
- seconds: on rank 0's clock since the end of its first step, which waits for everyone's start
  and pays for what is done once; measuring the model counts.
- bytes a step: sent and received by a worker from its start to its end / its steps;
  mean over workers.
- exposed: time that a step waited for the exchange and computed nothing; mean over workers.
- staleness: updates by others between a worker's read and its own update.
- final loss and metric: rank 0's on the test data, after all gradients are in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

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

    def without_speeds(self, reason: str) -> Measure:
        """What may be shown of a row that computed something else than it should have."""
        return replace(
            self,
            samples_per_second=None,
            step_ms=None,
            seconds_to_target=None,
            seconds=None,
            exposed_ms_per_step=None,
            withheld=reason,
        )

    def as_json(self) -> dict[str, Any]:
        """The measure as a JSON object."""
        return asdict(self)


def measure(row: Row, outcome: Outcome, job: Job, target: float) -> Measure:
    """Measures one run.

    Args:
        row: Which way was run.
        outcome: What the run left.
        job: Names the measure.
        target: Value of the measure that counts as reached.

    Raises:
        HubringError: A record holds fewer than two steps, or rank 0's no measurement.
    """
    finals = [line for line in outcome.records[0] if job.metric in line]
    if not finals or any(len(steps_of(record)) < 2 for record in outcome.records):
        raise HubringError(f"{row.name}: a worker recorded fewer than two steps: nothing to measure")
    reached = [line for line in finals if job.reached(line[job.metric], target)]
    began = _began(outcome)
    measured = {line["step"] for line in finals}
    paces = [_steady(record, measured) for record in outcome.records]
    exchanges = [result["exchange"] for result in outcome.results]
    return Measure(
        row=row.name,
        synchronous=row.synchronous,
        workers=len(outcome.records),
        steps=len(steps_of(outcome.records[0])),
        samples_per_second=sum(pace.samples / sum(pace.seconds) for pace in paces),
        step_ms=1e3 * median(seconds for pace in paces for seconds in pace.seconds),
        seconds_to_target=reached[0]["seconds"] - began if reached else None,
        seconds=finals[-1]["seconds"] - began,
        final_loss=finals[-1]["test_loss"],
        final_metric=finals[-1][job.metric],
        reached=bool(reached),
        bytes_per_step=_per_step(outcome, "bytes_sent") + _per_step(outcome, "bytes_received"),
        staleness_mean=fmean(exchange["staleness_mean"] for exchange in exchanges),
        staleness_max=max(exchange["staleness_max"] for exchange in exchanges),
        exposed_ms_per_step=1e3 * _per_step(outcome, "exposed_seconds"),
    )


def steps_of(record: Iterable[Line]) -> list[Line]:
    """The reports that steps made."""
    return [line for line in record if "samples" in line]


def _began(outcome: Outcome) -> float:
    """Zero of all seconds, on the clock of rank 0's record."""
    zero: float = steps_of(outcome.records[0])[0]["seconds"]
    return zero


class _Pace(NamedTuple):
    """A rank's steady steps: how many samples they were, and how long each took."""

    samples: int
    seconds: list[float]


def _steady(record: Sequence[Line], measured: set[int]) -> _Pace:
    """What counts for speed; `measured` holds the steps after which rank 0 measured the model."""
    steps = [(before, line) for before, line in pairwise(record) if "samples" in line]
    warm = steps[min(max(5, len(steps) // 10), len(steps) - 1) :]
    kept = [(before, line) for before, line in warm if line["step"] - 1 not in measured] or warm
    return _Pace(
        samples=sum(line["samples"] for _, line in kept),
        seconds=[line["seconds"] - before["seconds"] for before, line in kept],
    )


def _per_step(outcome: Outcome, name: str) -> float:
    """A number of the workers' last lines by step, as the mean over workers."""
    pairs = zip(outcome.results, outcome.records, strict=True)
    return fmean(result["exchange"][name] / len(steps_of(record)) for result, record in pairs)


def curves(outcome: Outcome, metric: str) -> dict[str, list[dict[str, float]]]:
    """How loss and measure fell or rose: points of `seconds`, `samples` and `value`.

    `loss` is the mean over ranks of each step's training loss, `metric` is rank
    0's measure. Samples are those of all workers, taken as rank 0's share times
    their number; what comes before the zero of all seconds is drawn there.
    """
    began, first = _began(outcome), outcome.records[0]
    seen = accumulate(line.get("samples", 0) * len(outcome.records) for line in first)
    points = [
        (line, {"seconds": max(0.0, line["seconds"] - began), "samples": samples})
        for line, samples in zip(first, seen, strict=True)
    ]
    # Ranks may have taken different numbers of steps where one was lost on the way.
    together = zip(*(steps_of(record) for record in outcome.records), strict=False)
    losses = [fmean(line["loss"] for line in ranks) for ranks in together]
    steps = [point for line, point in points if "samples" in line]
    return {
        "loss": [{**point, "value": loss} for point, loss in zip(steps, losses, strict=False)],
        "metric": [{**point, "value": line[metric]} for line, point in points if metric in line],
    }

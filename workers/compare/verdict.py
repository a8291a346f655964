"""What the numbers say, in plain words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workers.compare.job import Job
from workers.compare.measure import Measure

EVEN = 1.05
"""Two speeds closer than this ratio are called even: every row ran once."""


def verdict(measures: Sequence[Measure], job: Job, target: float) -> list[str]:
    """Sentences: who reached the target first, hub against ring, whether dividing paid, what is missing.

    Args:
        measures: One for every row; rows that the gate closed have no speeds.
        job: Names measure and samples.
        target: Value of the measure to reach.
    """
    return [
        *_withheld(measures),
        *_to_target(measures, job, target),
        *_hub_against_ring(measures, job),
        *_against_one_process(measures, job),
        *_asynchronous(measures),
    ]


def _withheld(measures: Iterable[Measure]) -> list[str]:
    return [
        f"No speed is shown for {measure.row}: {measure.withheld}."
        for measure in measures
        if measure.withheld is not None
    ]


def _to_target(measures: Sequence[Measure], job: Job, target: float) -> list[str]:
    goal = f"{job.title} {target:g}"
    times = {each.row: each.seconds_to_target for each in measures if each.seconds_to_target is not None}
    raced = sorted((seconds, row) for row, seconds in times.items())
    missed = [each for each in measures if not each.reached]
    said = [f"{each.row} did not reach {goal} in {each.steps} steps." for each in missed]
    if not raced:
        return said
    best, winner = raced[0]
    behind = [f"{row} needed {seconds / best:.2f} times as long" for seconds, row in raced[1:]]
    first = f"Fastest to {goal}: {winner}, in {best:.2f} s"
    return [f"{first}; {', '.join(behind)}." if behind else f"{first}.", *said]


def _hub_against_ring(measures: Iterable[Measure], job: Job) -> list[str]:
    """The like with the like: synchronous hub rows, which compute what the ring computes."""
    speeds = _speeds(each for each in measures if each.synchronous)
    ring = speeds.get("ring")
    hubs = {row: speed for row, speed in speeds.items() if row.startswith("hub-")}
    if not ring or not hubs:
        return []
    hub = max(hubs, key=lambda row: hubs[row])
    return [_contest(f"the hub ({hub})", hubs[hub], "the ring", ring, job)]


def _against_one_process(measures: Sequence[Measure], job: Job) -> list[str]:
    local = _speeds(measures).get("local")
    others = _speeds(each for each in measures if each.workers > 1)
    if not local or not others:
        return []
    row = max(others, key=lambda name: others[name])
    said = [_contest(f"{row}, the fastest of many workers,", others[row], "one process alone", local, job)]
    if others[row] < local:
        said.append("This job is too small, or this machine has too few cores, for dividing it to pay.")
    return said


def _speeds(measures: Iterable[Measure]) -> dict[str, float]:
    return {each.row: each.samples_per_second for each in measures if each.samples_per_second}


def _contest(first: str, mine: float, second: str, theirs: float, job: Job) -> str:
    ratio = max(mine, theirs) / min(mine, theirs)
    outcome = "is even with" if ratio < EVEN else "beats" if mine > theirs else "loses to"
    sentence = f"{first} {outcome} {second}: {mine:,.0f} {job.samples}/s against {theirs:,.0f}"
    return f"{sentence[0].upper()}{sentence[1:]}" + ("." if ratio < EVEN else f", a factor of {ratio:.2f}.")


def _asynchronous(measures: Iterable[Measure]) -> list[str]:
    rows = [each.row for each in measures if not each.synchronous and each.workers > 1]
    if not rows:
        return []
    return [
        f"{' and '.join(rows)} may end in other parameters than the rest: they take one step per worker,"
        " of its share of the batch, where the others take one step of the whole batch."
    ]

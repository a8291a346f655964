"""Whether a hub kept the rule of its row: which workers wait, how stale a gradient may be, and who counts.

In asynchronous rows the order of all pushes to a key is recorded, with the version of each answer. So it is
known which pushes of others an answer had. Of rounds, the server reports those that closed without a worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch.nn.functional import one_hot

from hubring.workers.compare.gate.asynchronous_steps import RecordedPush, pushes_by_key
from hubring.workers.compare.gate.recorded_steps import StepsOfOptimizers, by_optimizer
from hubring.workers.compare.gate.step_reference import StepFault
from hubring.workers.compare.run.outcome import RunOutcome

ENOUGH = 20
"""After so many pushes that were all answered with those of the others, workers wait for each other."""

UNSURE = 0.2
"""Share of pushes whose staleness may be lower than recorded: a script can pull between two steps."""


def check_rules(outcome: RunOutcome, ranks: Sequence[StepsOfOptimizers]) -> None:
    """Checks the rule of a run's row.

    Raises:
        StepFault: The hub broke it.
    """
    row, server, workers = outcome.run.row, outcome.server or {}, len(outcome.results)
    if not row.on_hub:
        return
    if (mode := server.get("mode", row.rule)) != row.rule:
        raise StepFault(0, f"its server ran in mode {mode}; the row needs mode {row.rule}")
    for run in (run for shard in server.get("shards") or () for run in shard.get("partial_rounds", ())):
        if (number := len(run["ranks"])) < workers - row.backup:
            text = f"the hub stepped with {number} of {workers} gradients"
            raise StepFault(run["first"] + 1, f"{text}; the row needs at least {workers - row.backup}")
    if row.synchronous or row.rule == "backup":
        return
    claimed = [(each or {}).get("exchange", {}).get("staleness") for each in outcome.results]
    recorded = [list[int]() for _ in ranks]
    for own in by_optimizer(ranks):
        for pushes in pushes_by_key(own).values():
            _check_waiting(pushes, workers, row.staleness if row.rule == "ssp" else None)
            read = dict[int, int]()
            for one in pushes:
                recorded[one.rank] += [one.position - read[one.rank]] if one.rank in read else []
                read[one.rank] = one.version
    for rank, (said, found) in enumerate(zip(claimed, recorded, strict=True)):
        given = Counter({int(value): count for value, count in (said or {}).items()})
        if said and (Counter(found) - given).total() > UNSURE * len(found):
            mean = sum(value * count for value, count in given.items()) / given.total()
            text = f"rank {rank} reports a mean staleness of {mean:.2g}"
            raise StepFault(0, f"{text}, and its recorded pushes had {sum(found) / len(found):.2g}")


def _check_waiting(pushes: Sequence[RecordedPush], workers: int, bound: int | None) -> None:
    """Checks that no worker read too early, and that they did not all wait for each other.

    Args:
        pushes: All pushes to a key, in order.
        workers: The number of workers.
        bound: By how many steps a worker may lead; None: any.
    """
    by = torch.tensor([one.rank for one in pushes])
    applied = torch.cat([torch.zeros(1, workers), one_hot(by, workers).cumsum(0)])
    answers = applied[torch.tensor([min(one.version, len(pushes)) for one in pushes])]
    own = applied[1:].gather(1, by[:, None])
    # Workers wait for none that has taken all of its steps.
    leads, slowest = torch.where(answers < applied[-1], own - answers, 0).max(1)
    if bound is not None and bool((leads > bound).any()):
        first = int((leads > bound).int().argmax())
        lead, last = int(leads[first]), int(slowest[first])
        text = f"rank {by[first]} read parameters {lead} steps ahead of rank {last}"
        raise StepFault(pushes[first].step.step, f"{text}; at most {bound} are allowed")
    if workers > 1 and len(pushes) >= ENOUGH and not bool((leads > 0).any()):
        raise StepFault(0, "its workers waited for each other in every step, as in a row that is synchronous")

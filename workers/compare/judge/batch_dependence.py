"""Scripts whose workers compute other gradients, by right, than one process with the whole batch.

BatchNorm normalizes with the samples of one worker's part of the batch. Autocast rounds each part by itself.
Then `local` differs from all other rows, which agree with each other, and none of them is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hubring.workers.audit.audit import AUTOCAST
from hubring.workers.audit.step_tap import BATCH_NORM
from hubring.workers.compare.experiment.plan import Run
from hubring.workers.compare.judge.steps.step_checks import RunCheck
from hubring.workers.compare.result.findings import Pair

_ADVICE = {
    BATCH_NORM: (
        "its BatchNorm layers see one worker's part of the batch, and local's see the whole batch. To compare"
        " with local too, use hubring.horovod.SyncBatchNorm, GroupNorm or LayerNorm"
    ),
    AUTOCAST: (
        "autocast rounds each worker's part of the batch by itself. To compare with local too, run once"
        " without autocast, or allow more with --tolerance"
    ),
}


def excused(runs: Sequence[Run], pairs: Sequence[Pair], checks: Mapping[str, RunCheck]) -> str:
    """Returns why `local` differs by right, and what to do, as a sentence; empty if it does not.

    Args:
        runs: The runs that are compared. The first one is the reference.
        pairs: The comparisons with it.
        checks: The runs' steps by label.
    """
    known = [checks[run.label] for run in runs if run.label in checks]
    if len(runs) < 2 or runs[0].row.name != "local" or all(pair.passed for pair in pairs):
        return ""
    if len(known) < len(runs) or not all(each.checked.complete for each in known):
        return ""
    facts = frozenset[str]().union(*(each.facts for each in known))
    reasons = [_ADVICE[fact] for fact in (BATCH_NORM, AUTOCAST) if fact in facts]
    return f"The other rows differ from local by right: {'; '.join(reasons)}." if reasons else ""

"""Whether ranks train on samples of their own, and whether each gradient has the weight of its samples.

The mean over ranks gives all of them the same weight. If their numbers of samples differ, the script must
weigh its losses. Whether it does shows in the same step of a single process with the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hubring.workers.compare.judge.steps.checked import Fault
from hubring.workers.compare.judge.steps.recorded import RecordedStep

CLEARER = 3.0
"""By how much closer to the single process the weighted mean must be than the equal one."""

SEEN = 1e-3
"""Smallest difference of the equal mean, relative to the gradient, that counts."""

ALIKE_STEPS = 3
"""After so many steps with equal gradients, two ranks train on the same samples."""

Samples = Mapping[int, Sequence[float]]
"""Every rank's reported samples, by step."""

FIX = "multiply each worker's mean loss by its samples * hubring.size() / all samples, or use drop_last=True"


def same_samples(ranks: Sequence[Sequence[RecordedStep]], alone: Sequence[RecordedStep]) -> int:
    """Compares the ranks' gradients with each other, and with those of a single process if all are the same.

    Args:
        ranks: Every rank's steps.
        alone: The steps of the single process; empty without one.

    Returns:
        A rank whose gradients are those of rank 0 in all steps, if no single process shows whether that is
        right; else 0.

    Raises:
        Fault: It is wrong, because the single process has other gradients.
    """
    for rank in range(1, len(ranks)):
        pairs = [pair for pair in zip(ranks[0], ranks[rank], strict=False) if bool(pair[0].own.any())]
        if len(pairs) < ALIKE_STEPS or not all(torch.equal(one.own, other.own) for one, other in pairs):
            continue
        if not alone or alone[0].own.shape != ranks[0][0].own.shape:
            return rank
        whole, own = alone[0].own.double(), ranks[0][0].own.double()
        if float((whole - own).norm()) > SEEN * float(whole.norm()):
            text = f"ranks 0 and {rank} computed the same gradients in all {len(pairs)} steps, unlike local"
            raise Fault(0, f"{text}, so they train on the same samples; use hubring.ShardedSampler")
    return 0


def uneven(
    ranks: Sequence[Sequence[RecordedStep]], samples: Samples, alone: Sequence[RecordedStep]
) -> list[int]:
    """Compares steps with uneven samples with those of a single process.

    Args:
        ranks: Every rank's steps.
        samples: Their samples.
        alone: The steps of the single process; empty without one.

    Returns:
        The uneven steps that could not be compared, in order.

    Raises:
        Fault: The ranks' gradients have the same weight, and should not.
    """
    single = {one.step: one.own.double() for one in alone}
    unknown = []
    for each in zip(*ranks, strict=False):
        step, counts = each[0].step, samples.get(each[0].step, ())
        if len(set(counts)) < 2 or len(counts) != len(each):
            continue
        own = torch.stack([one.own.double() for one in each])
        whole = single.get(step)
        if whole is None or whole.shape != own[0].shape:
            unknown.append(step)
            continue
        weights = torch.tensor(counts, dtype=torch.float64)
        weighted = (own * (weights / weights.sum())[:, None]).sum(0)
        equal, other = float((whole - own.mean(0)).norm()), float((whole - weighted).norm())
        if equal > SEEN * float(whole.norm()) and equal > CLEARER * other:
            took = " and ".join(f"{count:g}" for count in counts)
            raise Fault(step, f"workers took {took} samples, and their gradients have the same weight; {FIX}")
    return unknown

"""Whether rows trained on the same samples, step by step, from the hashes that workers recorded.

Ranks divide a batch, so only all ranks together must have it. Rows with the same workers divide it alike, and
must have the same samples in every step. A single process can have up to a sample per rank more or fewer in
the last, smaller batch of an epoch, because samplers make shards equally long.

A model's input need not show its samples: collators pad to the longest sample of a rank's part, some models
take a batch along another dimension, and other models can make inputs and labels, which then differ by
rounding. It shows in the first step that differs: the samples do, and the mean gradients do not.

The mean over ranks gives all of them the same weight. If their numbers of samples differ, the script must
weigh its losses. Whether it does shows in the same step of a single process with the whole batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hubring.workers.compare.gate.recorded_steps import (
    RecordedStep,
    StepsOfOptimizers,
    by_optimizer,
    mean_of,
)
from hubring.workers.compare.gate.step_reference import StepFault

SHOWN = 1e-4
"""Largest difference of two mean gradients of the same samples, relative to the gradient."""

CLEARER, SEEN = 3.0, 1e-3
"""By how much closer to a single process the weighted mean must be than the equal one, and the smallest
difference of the equal mean, relative to the gradient, that counts."""

SHARES_FIX = "set optimizer.weight to each worker's number of samples before backward, or use drop_last=True"


class StepSamples(NamedTuple):
    """What all ranks trained on in one step of an optimizer.

    Attributes:
        step: The step.
        counts: The ranks' numbers of samples.
        sums: The sums of their hashes.
        epochs: Where the ranks' samples come from.
        hashes: Of all samples, in rank order: int64.
        options: The options of each parameter group; empty if ranks do not step together.
        own: The ranks' gradients.
        weights: What they count in the mean.
    """

    step: int
    counts: tuple[int, ...]
    sums: tuple[int, ...]
    epochs: tuple[tuple[int, ...], ...]
    hashes: Tensor
    options: list[dict[str, Any]]
    own: tuple[Tensor, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, ranks: Sequence[RecordedStep]) -> StepSamples:
        """Returns the batch of one step of all ranks that took it."""
        samples = [one.samples for one in ranks if one.samples is not None]
        sums, epochs = (int(each.sum()) for each in samples), (one.epoch for one in ranks)
        options = ranks[0].options if ranks[0].layout.lockstep else []
        counts, own = map(len, samples), (one.own for one in ranks)
        each = tuple(counts), tuple(sums), tuple(epochs)
        weights = tuple(one.weight for one in ranks)
        return cls(ranks[0].step, *each, torch.cat(samples), options, tuple(own), weights)

    def other_options(self, other: StepSamples) -> str:
        """Returns how the options differ from those of another step, as `lr=0.1 and lr=0.2`; empty if not."""
        for one, theirs in zip(self.options, other.options, strict=False):
            for name in one.keys() & theirs.keys():
                if one[name] != theirs[name]:
                    return f"{name}={one[name]} and {name}={theirs[name]}"
        return ""

    @property
    def took(self) -> str:
        """The ranks' numbers of samples, in words."""
        return f"{' and '.join(map(str, self.counts))} samples"

    @property
    def digest(self) -> tuple[int, int]:
        """Differs if the samples differ, and does not depend on how they are divided."""
        return len(self.hashes), sum(self.sums) % (1 << 64)

    def without(self, other: StepSamples) -> int:
        """Returns how many samples another batch does not have."""
        return (Counter(self.hashes.tolist()) - Counter(other.hashes.tolist())).total()

    def apart(self, other: StepSamples, weights: Sequence[int] = ()) -> float:
        """Returns how far the ranks' mean gradient is from that of another step, relative to the latter.

        Args:
            other: The other step. Infinite if it is of another optimizer.
            weights: Of each rank; empty: those with which it trained.
        """
        if len({each.shape for each in (*self.own, *other.own)}) > 1:
            return math.inf
        one, theirs = (torch.stack(each.own).double() for each in (self, other))
        mean, right = mean_of(one, weights or self.weights), theirs.mean(0)
        return float((mean - right).norm() / right.norm())


class RunSamples(NamedTuple):
    """The samples of one run.

    Attributes:
        name: Its row.
        ranks: Its number of ranks.
        batches: In the order of steps, for one optimizer after another.
    """

    name: str
    ranks: int
    batches: list[StepSamples]

    @classmethod
    def of(cls, name: str, ranks: Sequence[StepsOfOptimizers]) -> RunSamples | None:
        """Returns the samples of a run; None if its workers did not record them."""
        rounds = (each for own in by_optimizer(ranks) for each in zip_longest(*own))
        steps = [[one for one in each if one is not None] for each in rounds]
        if not steps or any(one.samples is None for each in steps for one in each):
            return None
        batches = [StepSamples.of(each) for each in steps]
        return cls(name, len(ranks), batches) if any(len(each.hashes) for each in batches) else None

    @property
    def digests(self) -> tuple[tuple[int, int], ...]:
        """The digests of all batches."""
        return tuple(each.digest for each in self.batches)

    @property
    def is_random(self) -> bool:
        """Whether no sample looks as in an earlier epoch, as with random augmentation."""
        epochs: dict[int, set[int]] = {}
        for each in self.batches:
            number = each.epochs[0][0] if each.epochs[0] else 0
            epochs.setdefault(number, set()).update(each.hashes.tolist())
        return len(epochs) > 1 and not any(one & other for one, other in pairwise(epochs.values()))


def check_within(run: RunSamples) -> None:
    """Checks one run by itself.

    Raises:
        StepFault: Ranks read the same samples, or every epoch has the same order though it is shuffled.
    """
    whole = [each for each in run.batches if len(each.sums) == run.ranks]
    if len(set(run.digests)) < 2:
        return  # one batch again and again, as in a benchmark
    for rank in range(1, run.ranks):
        if len(whole) > 2 and all(each.sums[0] == each.sums[rank] for each in whole):
            text = f"ranks 0 and {rank} trained on the same samples in all {len(whole)} steps"
            raise StepFault(0, f"{text}; use hubring.ShardedSampler")
    for rank in range(run.ranks):
        passes: dict[tuple[int, ...], list[int]] = {}
        for each in whole:
            if len(each.epochs[rank]) > 1:
                passes.setdefault(each.epochs[rank], []).append(each.sums[rank])
        for (before, old), (after, new) in pairwise(passes.items()):
            if before[1:] == after[1:] and after[2] and len(set(new)) > 1 and old == new:
                text = f"passes {before[0]} and {after[0]} over the data have the same order on rank {rank}"
                raise StepFault(0, f"{text}; call the sampler's set_epoch(epoch) before each epoch")


def check_alike(run: RunSamples, right: RunSamples) -> str:
    """Compares a run with one that is taken as right.

    Returns:
        What could not be compared, as a sentence; empty if nothing.

    Raises:
        StepFault: The run trained on other samples, or took another number of steps.
    """
    pairs = list(zip(run.batches, right.batches, strict=False))
    spare = max(run.ranks, right.ranks) if run.ranks != right.ranks else 0
    usual = max(len(each.hashes) for each in right.batches)
    apart = [
        (one, other)
        for one, other in pairs
        if one.digest != other.digest
        and not (len(other.hashes) < usual and max(one.without(other), other.without(one)) < spare)
    ]
    if len(run.batches) != len(right.batches):
        since = f"; their samples differ from step {apart[0][0].step} on" if apart else ""
        raise StepFault(0, f"it took {len(run.batches)} steps, and {right.name} {len(right.batches)}{since}")
    for one, other in pairs:
        if said := one.other_options(other):
            raise StepFault(one.step, f"the optimizers of {run.name} and {right.name} have {said}")
    if not apart:
        return ""
    (one, other), number = apart[0], len(apart[0][0].hashes)
    even = number == len(other.hashes)
    if (spare or even) and one.apart(other) <= SHOWN:
        said = f"From step {one.step} on, inputs of {run.name} and {right.name} differ, and gradients do not"
        return f"{said}, as with padding, or with inputs that a model makes: their samples are not compared."
    if not even:
        raise StepFault(one.step, f"its workers took {one.took}, and those of {right.name} {other.took}")
    if len(apart) == len(pairs) and run.is_random and right.is_random:
        said = f"The samples of {run.name} and {right.name} change from epoch to epoch"
        return f"{said}, as with random augmentation: only their number is compared."
    text = f"{one.without(other)} of its {number} samples, or their labels"
    raise StepFault(one.step, f"{text}, are others than those of {right.name}")


def check_shares(run: RunSamples, alone: RunSamples | None) -> str:
    """Compares steps in which ranks had other numbers of samples, and no weights, with those of one process.

    Returns:
        What the first one that could not be compared needs, in sentences; empty if there is none.

    Raises:
        StepFault: The ranks' gradients have the same weight, and should not.
    """
    unknown = ""
    for each, whole in zip_longest(run.batches, [] if alone is None else alone.batches):
        if each is None or len(set(each.counts)) < 2 or len(each.counts) < run.ranks:
            continue
        if len(set(each.weights)) > 1:
            continue  # the script weighs them itself, by tokens maybe
        equal = math.inf if whole is None or whole.step != each.step else each.apart(whole)
        if equal == math.inf:
            unknown = unknown or (
                f"In step {each.step} of {run.name}, workers took {each.took}, and their gradients have the"
                f" same weight. If the script does not weigh its loss, {SHARES_FIX}. Add the row local to"
                " check this."
            )
        elif equal > max(SEEN, CLEARER * each.apart(whole, each.counts)):
            text = f"workers took {each.took}, and their gradients have the same weight"
            raise StepFault(each.step, f"{text}; {SHARES_FIX}")
    return unknown


def reference(runs: Sequence[RunSamples]) -> RunSamples | None:
    """Returns the single process, or else a run with the samples of most; None if no more than half agree."""
    if alone := next((each for each in runs if each.name == "local"), None):
        return alone
    ((digests, number),) = Counter(each.digests for each in runs).most_common(1)
    return next(each for each in runs if each.digests == digests) if 2 * number > len(runs) else None

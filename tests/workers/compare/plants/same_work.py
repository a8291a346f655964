"""Rows that train on other samples, or take other steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, Subset

from tests.support.compare.audited import CLASSES, FEATURES, Script, Training, taking
from tests.support.compare.correct_scripts import (
    SCRIPTS,
    accumulated,
    clipped,
    frozen,
    in_bfloat16,
    made,
    normalized,
    rounded,
    scaled,
    take_as,
    through_closure,
    weighted,
)
from tests.support.compare.planted import PLANTED
from tests.support.compare.unusual_scripts import UNUSUAL
from tests.workers.compare.plants.frame import Plant, dataset, loaded

LATE = 22
"""A step after those that are compared by their parameters."""


def loading(**changes: Any) -> Script:
    """Returns the usual script with another loader."""
    return Script(loads=partial(loaded, **changes))


Batches = Iterator[tuple[Tensor, Tensor]]


def changed(change: Callable[[int, Batches], Batches], **more: Any) -> Script:
    """Returns the usual script with other batches; `change` gets the rank and the right ones."""
    return Script(loads=lambda rank, size: change(rank, loaded(rank, size, **more)))


Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def late(change: Change, rank: int) -> Script:
    """Returns the usual script with one other batch, on one rank."""

    def batches(own: int, right: Batches) -> Batches:
        for number, batch in enumerate(right, 1):
            yield change(*batch) if number == LATE and own == rank else batch

    return changed(batches)


def half(rank: int, right: Batches) -> Batches:
    for inputs, labels in right:
        yield (inputs[::2], labels[::2]) if rank == 1 else (inputs, labels)


def skipping(rank: int, right: Batches) -> Batches:
    return (batch for number, batch in enumerate(right, 1) if number != LATE)


def merging(rank: int, right: Batches) -> Batches:
    for one, other in zip(right, right, strict=True):
        yield torch.cat([one[0], other[0]]), torch.cat([one[1], other[1]])


def swapping(rank: int, right: Batches) -> Batches:
    batches = list(right)
    batches[21], batches[22] = batches[22], batches[21]
    return iter(batches)


def repeating(rank: int, right: Batches) -> Batches:
    first, *rest = right
    return iter([first] * (1 + len(rest)) if rank == 1 else [first, *rest])


def twice(rank: int, right: Batches) -> Batches:
    batches = list(right)
    batches[LATE - 1] = batches[LATE - 2]
    return iter(batches)


def evaluating(rank: int, right: Batches) -> Batches:
    other = loaded(rank, 2, data=1)
    return (next(other) if number > LATE else batch for number, batch in enumerate(right, 1))


def shuffled(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return inputs, labels.roll(1)


def noisy(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return inputs + 1e-3, labels


def _ring(script: Script, *says: str, rows: tuple[str, ...] = ("local", "ring", "hub-bsp")) -> Plant:
    return Plant(says, {"ring": script}, rows=rows)


OTHERS = "of its 12 samples, or their labels, are others than those of local"

PLANTS: dict[str, Plant] = {
    "one epoch fewer": _ring(loading(epochs=7), "ring is wrong (seed 0): it took 21 steps, and local 24"),
    "one epoch more": _ring(loading(epochs=9), "ring is wrong (seed 0): it took 27 steps, and local 24"),
    "one epoch fewer without a single process": _ring(
        loading(epochs=7), "it took 21 steps, and hub-bsp 24", rows=("ring", "hub-bsp")
    ),
    "one epoch fewer in an asynchronous row": Plant(
        ("hub-asp is wrong (seed 0): it took 21 steps, and local 24",),
        {"hub-asp": loading(epochs=7)},
        rows=("local", "ring", "hub-asp"),
    ),
    "the last batch of an epoch is kept": _ring(loading(drop_last=False), "it took 32 steps, and local 24"),
    "half a batch on one rank": _ring(
        changed(half),
        "step 1 of ring is wrong (seed 0): its workers took 6 and 3 samples, and those of",
    ),
    "half a batch in an asynchronous row": Plant(
        ("its workers took 6 and 3 samples",), {"hub-asp": changed(half)}, rows=("ring", "hub-bsp", "hub-asp")
    ),
    "a smaller batch": _ring(loading(batch=8), "it took 40 steps, and local 24"),
    "the same shard on two ranks": _ring(loading(shard=0), "ranks 0 and 1 trained on the same samples"),
    "the same shard in all rows": Plant(
        ("ranks 0 and 1 trained on the same samples in all 24 steps",),
        script=loading(shard=0),
        rows=("ring", "hub-bsp"),
    ),
    "no set_epoch in one row": _ring(loading(sets_epoch=False), "call the sampler's set_epoch(epoch)"),
    "no set_epoch in all rows": Plant(
        ("have the same order on rank 0; call the sampler's set_epoch(epoch)",),
        script=loading(sets_epoch=False),
    ),
    "no shuffling in one row": _ring(loading(shuffle=False), "step 1 of ring", OTHERS),
    "another seed of the sampler": _ring(loading(seed=1), "step 1 of ring", OTHERS),
    "other data in the last steps": _ring(changed(evaluating), "step 23 of ring", f"12 {OTHERS}"),
    "labels of one rank are shuffled once": _ring(late(shuffled, 1), f"step {LATE} of ring", OTHERS),
    "inputs of one rank are changed once": _ring(late(noisy, 0), f"step {LATE} of ring", f"6 {OTHERS}"),
    "a step is skipped": _ring(
        changed(skipping), f"it took 23 steps, and local 24; their samples differ from step {LATE} on"
    ),
    "two batches are one step": _ring(changed(merging), "it took 12 steps, and local 24"),
    "two batches are swapped": _ring(changed(swapping), f"step {LATE} of ring", OTHERS),
    "a rank repeats its first batch": _ring(changed(repeating), "step 2 of ring", f"6 {OTHERS}"),
    "a batch comes twice": _ring(changed(twice), f"step {LATE} of ring", OTHERS),
}


def annealing(training: Training) -> None:
    """Lowers the learning rate late."""
    if training.number == LATE:
        training.optimizer.param_groups[0]["lr"] *= 0.5


def other_start() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def usual(**changes: Any) -> Script:
    """Returns the usual script with another model, optimizer or step."""
    return Script(loads=loaded, **changes)


PLANTS |= {
    "a learning rate for each rank": _ring(
        usual(optimizer=made(torch.optim.SGD, lr=0.2, momentum=0.9)),
        "step 1 of ring is wrong (seed 0): the optimizers of ring and local have lr=0.2 and lr=0.1",
    ),
    "a lower learning rate in the last steps": _ring(
        usual(before=annealing), f"step {LATE} of ring", "have lr=0.05 and lr=0.1"
    ),
    "weight decay in one row": _ring(
        usual(optimizer=made(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)),
        "weight_decay=0.01 and",
    ),
    "a frozen layer": _ring(usual(model=frozen), "ring differs from local"),
    "clipped in one row": _ring(usual(take=clipped), "ring differs from local"),
    "a sum instead of a mean": _ring(
        usual(take=taking(lambda *given: 6 * Training.loss(*given))), "ring differs from local"
    ),
    "bfloat16 in one row": _ring(usual(take=in_bfloat16), "ring differs from local"),
    "a bfloat16 model, which a hub steps in float32": Plant(
        ("dtype of the steps", "float32 in hub-bsp, and bfloat16 in local"),
        script=usual(model=rounded, take=take_as(torch.bfloat16)),
    ),
    "another initialisation": _ring(usual(model=other_start), "ring differs from local"),
    "a gradient that is not sent": Plant(
        ("as if rank 1 had sent nothing",),
        plant=PLANTED["a rank sends nothing once, on a ring"].plant,
        within=("ring",),
    ),
    "a gradient that is lost on the hub": Plant(
        ("step 9 of hub-bsp",), plant=PLANTED["a hub loses a rank once"].plant, within=("hub-bsp",)
    ),
    "parameters of the step before": Plant(
        ("step 9 of hub-bsp", "on rank 1"),
        plant=PLANTED["a hub sends old parameters"].plant,
        within=("hub-bsp",),
    ),
}


def changing_alone(training: Training) -> None:
    """Evaluates between steps."""
    training.model.eval()
    with torch.no_grad():
        training.model(torch.ones(3, 6))
    training.model(torch.ones(5, 6))
    training.model.train()


def padded(rank: int, right: Batches) -> Batches:
    """Appends a column with the size of the rank's part, as padding would."""
    for inputs, labels in right:
        yield torch.cat([inputs[:, :5], torch.zeros(len(inputs), 1) + 1e-9 * len(inputs)], 1), labels


def padded_shards(rank: int, size: int) -> Batches:
    """Leaves no sample out: of the last of 45 samples, torch makes two for two ranks."""
    source: ConcatDataset[Any] = ConcatDataset([dataset(), Subset(dataset(1), range(5))])
    sampler: DistributedSampler[Any] = DistributedSampler(source, size, rank)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        yield from DataLoader(source, 2 // size, sampler=sampler)


def augmented(rank: int, size: int) -> Batches:
    """Changes inputs at random, by the rank's own numbers."""
    generator = torch.Generator().manual_seed(rank)
    for inputs, labels in loaded(rank, size):
        yield inputs + 0.1 * torch.randn(inputs.shape, generator=generator), labels


def made_by_a_model(training: Training, inputs: Tensor, labels: Tensor) -> Tensor:
    """Trains on what parameters make of the inputs, as with two networks."""
    scale = 1 + next(training.model.parameters()).detach().mean()
    return training.loss(inputs * scale, labels)


CONTROLS: dict[str, Plant] = {
    "inputs that a model makes": Plant(script=usual(take=taking(made_by_a_model))),
    "the README's script": Plant(),
    "all rows": Plant(rows=("local", "ring", "hub-bsp", "hub-aggregate", "hub-asp")),
    "no single process": Plant(rows=("ring", "hub-bsp", "hub-asp")),
    "the last batch is kept": Plant(script=loading(drop_last=False, batch=10)),
    "no shuffling": Plant(script=loading(shuffle=False)),
    "one epoch": Plant(script=loading(epochs=1)),
    "evaluation between steps": Plant(script=Script(loads=loaded, before=changing_alone)),
    "padding": Plant(script=changed(padded)),
    "accumulated": Plant(
        script=Script(loads=loaded, take=accumulated, options={"backward_passes_per_step": 2})
    ),
    "clipped": Plant(script=Script(loads=loaded, take=clipped)),
    "scaled": Plant(script=Script(loads=loaded, take=scaled)),
    "a closure": Plant(script=Script(loads=loaded, take=through_closure)),
    "batch norm": Plant(script=Script(normalized, loads=loaded)),
    "adam": Plant(script=usual(optimizer=made(torch.optim.Adam, lr=0.01))),
    "a schedule": Plant(script=usual(before=annealing)),
    "a frozen layer": Plant(script=usual(model=frozen)),
    "autocast": Plant(script=usual(take=in_bfloat16), rows=("ring", "hub-bsp")),
    "torch's sampler, which repeats samples": Plant(script=Script(loads=padded_shards)),
    "an uneven last batch with weights": Plant(script=Script(take=taking(weighted), last=7)),
    "ranks with fewer batches": Plant(script=SCRIPTS["ranks with fewer batches"], rows=("ring", "hub-bsp")),
    "recomputed activations": Plant(script=UNUSUAL["checkpointed"]),
    "a gradient penalty": Plant(script=UNUSUAL["gradient penalty"], rows=("ring", "hub-bsp")),
    "across the barrier": Plant(script=usual(options={"cross_barrier": True})),
    "another seed of the sampler": Plant(script=loading(seed=1)),
    "asynchronous": Plant(rows=("ring", "hub-asp", "hub-ssp")),
    "asynchronous, with a single process": Plant(rows=("local", "hub-asp")),
    "noise in each epoch": Plant(script=Script(loads=augmented), rows=("ring", "hub-bsp", "hub-asp")),
}

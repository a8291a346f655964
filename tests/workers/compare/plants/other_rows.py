"""One row of the largest layer takes wrong steps, late, and outside of what is recorded in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from hubring.ps.store.key_state import KeyEntry
from hubring.workers.audit.sample import sample
from tests.support.compare.audited import CLASSES, KINDS, Script, Training, plain, sgd
from tests.support.compare.correct_scripts import made
from tests.support.compare.worker_faults import instead
from tests.workers.compare.plants.frame import Plant

WIDTH, ROWS, ROW = 6, 2000, 705
LATE, FACTOR = 22, 0.7
"""Rows are compared after 20 steps anyway."""
STEPS = 36

ADAM = made(torch.optim.Adam, lr=1e-3)


def tall() -> nn.Module:
    """Returns a model with a layer of so many rows that few have a recorded element."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, ROWS), nn.Tanh(), nn.Linear(ROWS, CLASSES))
    recorded = {each // WIDTH for each in sample("0.weight", WIDTH * ROWS, 4).elements}
    assert ROW not in recorded
    return model


def _row(training: Training) -> Tensor:
    layer = training.layers[0]
    assert isinstance(layer, nn.Linear)
    return layer.weight.data[ROW]


def _scaled(training: Training, inputs: Tensor, labels: Tensor, *, topology: str) -> None:
    """Changes one row after the step."""
    before = _row(training).clone()
    plain(training, inputs, labels)
    if training.number >= LATE and training.communicator.topology == topology:
        _row(training).lerp_(before, 1 - FACTOR)


def _stepped(training: Training, inputs: Tensor, labels: Tensor, *, topology: str) -> None:
    """Changes one row within the step of torch's optimizer."""

    def change(*_: Any) -> None:
        _row(training).lerp_(training.kept["row"], 1 - FACTOR)

    if training.number == LATE and training.communicator.topology == topology:
        training.inner.register_step_post_hook(change)
    training.kept["row"] = _row(training).clone()
    plain(training, inputs, labels)


def training_with(
    take: Callable[..., None] = plain, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
) -> Script:
    """Returns a script with that model."""
    return Script(tall, optimizer, take, steps=STEPS, options={"bucket_bytes": 1 << 20})


def _larger_slices() -> Any:
    """So large a layer would have thousands of slices."""
    return patch.object(KINDS["hub-bsp"], "slice_bytes", 4096)


@contextmanager
def _wrong_on_hub() -> Iterator[None]:
    """The hub steps one row wrongly."""

    row = next(tall().parameters()).detach()[ROW]
    found = dict[int, slice]()

    def wrong(step: Any, entry: KeyEntry, *given: Any) -> None:
        if not entry.version:
            places = (entry.values.unfold(0, WIDTH, 1) == row).all(1).nonzero().flatten().tolist()
            found.update({id(entry): slice(place, place + WIDTH) for place in places})
        before = entry.values.clone()
        step(entry, *given)
        if entry.version >= LATE and id(entry) in found:
            entry.values[found[id(entry)]].lerp_(before[found[id(entry)]], 1 - FACTOR)

    with _larger_slices(), instead(KeyEntry, "step", wrong):
        yield
    assert len(found) == 1


SAYS = ("step 32 of", "is wrong", "the update of 0.weight", "is off by")
TWO = ("local", "ring")

PLANTS: dict[str, Plant] = {
    f"a row is stepped wrongly on the ring, {name}": Plant(
        SAYS, script=training_with(partial(_stepped, topology="ring"), optimizer), rows=TWO
    )
    for name, optimizer in (("sgd", sgd), ("adam", ADAM))
} | {
    f"a row is stepped wrongly on the hub, {name}": Plant(
        SAYS,
        script=training_with(optimizer=optimizer),
        rows=("local", "hub-bsp"),
        plant=_wrong_on_hub,
        within=("hub-bsp",),
    )
    for name, optimizer in (("sgd", sgd), ("adam", ADAM))
}
PLANTS["a row is changed between the steps of the ring"] = Plant(
    ("step 33 of ring is wrong", "parameters changed between the last step and this one"),
    script=training_with(partial(_scaled, topology="ring")),
    rows=TWO,
)

CONTROLS: dict[str, Plant] = {
    f"a tall layer, {name}": Plant(
        script=training_with(optimizer=optimizer), plant=_larger_slices, within=("hub-bsp",)
    )
    for name, optimizer in (
        ("sgd", sgd),
        ("adam", ADAM),
        ("rmsprop", made(torch.optim.RMSprop, lr=1e-4)),
        ("adagrad", made(torch.optim.Adagrad)),
        ("nadam", made(torch.optim.NAdam)),
        ("sgd without momentum", made(torch.optim.SGD, lr=0.1)),
    )
}

"""Hubs that do not keep the rule of their row, and elements and options that differ in one row."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from hubring.ps.store.consistency import SSP, Consistency
from hubring.workers.audit.sample import sample
from tests.support.compare.audited import KINDS, Script, Training, nothing, sgd
from tests.support.compare.correct_scripts import made
from tests.workers.compare.plants.frame import Plant, loaded


def leading(far: int) -> Script:
    """Returns a script whose rank 1 begins its second step once rank 0 has begun step `far`."""
    begun = threading.Event()

    def before(training: Training) -> None:
        rank = training.communicator.rank
        if rank == 0 and training.number == far:
            begun.set()
        if rank == 1 and training.number == 2:
            begun.wait(10.0)

    return Script(loads=loaded, before=before)


def _never_waits() -> Any:
    return patch.object(Consistency, "may_read", lambda *_: True)


def _waits() -> Any:
    return patch.object(KINDS["hub-asp"], "consistency", lambda _: SSP(0))


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 60), nn.Tanh(), nn.Linear(60, 4))


def freezing(topology: str) -> Callable[[Training], None]:
    """Returns what keeps five weights of the largest layer as they are after step 21."""

    def before(training: Training) -> None:
        layer = training.layers[0]
        assert isinstance(layer, nn.Linear)
        weights = layer.weight.data.view(-1)
        sampled = sample("0.weight", len(weights), 4).elements
        chosen = torch.tensor([each for each in range(len(weights)) if each not in sampled][::70][:5])
        if training.number == 21:
            training.kept["weights"] = weights[chosen].clone()
        if training.number > 21 and training.communicator.topology == topology:
            weights[chosen] = training.kept["weights"]

    return before


def large(
    before: Callable[[Training], None] = nothing,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    steps: int = 80,
) -> Script:
    """Returns a script with a layer of which few elements are sampled."""
    return Script(wide, optimizer, before=before, steps=steps, options={"bucket_bytes": 1 << 20})


ASYNCHRONOUS = ("ring", "hub-asp")
ADAM = made(torch.optim.Adam, lr=1e-3)

PLANTS: dict[str, Plant] = {
    "a worker leads too far": Plant(
        ("rank 0 read parameters 3 steps ahead of rank 1; at most 2 are allowed",),
        {"hub-ssp": leading(8)},
        rows=("ring", "hub-ssp"),
        plant=_never_waits,
        within=("hub-ssp",),
    ),
    "an asynchronous hub waits": Plant(
        ("its workers waited for each other in every step",),
        rows=ASYNCHRONOUS,
        plant=_waits,
        within=("hub-asp",),
    ),
    "a server in another mode": Plant(
        ("its server ran in mode bsp; the row needs mode asp",),
        rows=ASYNCHRONOUS,
        replays={"server": {"hub-asp": {"mode": "bsp"}}},
    ),
    "a round without a rank": Plant(
        ("step 10 of hub-bsp", "the hub stepped with 1 of 2 gradients; the row needs at least 2"),
        replays={
            "server": {
                "hub-bsp": {"shards": [{"partial_rounds": [{"key": 0, "first": 9, "last": 9, "ranks": [0]}]}]}
            }
        },
    ),
    "a staleness that is not true": Plant(
        ("rank 0 reports a mean staleness of 9",),
        rows=ASYNCHRONOUS,
        replays={"results": {"hub-asp": {"exchange": {"staleness": {"9": 24}}}}},
    ),
    "five weights are frozen": Plant(
        ("ring is wrong", "had gradients and did not change; in other rows all elements did"),
        script=large(freezing("ring")),
        rows=("local", "ring"),
    ),
    "five weights are frozen, adam": Plant(
        ("ring is wrong", "had gradients and did not change; in other rows all elements did"),
        script=large(freezing("ring"), ADAM),
        rows=("local", "ring"),
    ),
}

CONTROLS: dict[str, Plant] = {
    "a worker leads": Plant(script=leading(3), rows=("hub-ssp", "hub-asp")),
    "a worker leads far": Plant(script=leading(8), rows=("hub-asp",)),
    "a large layer": Plant(script=large(), rows=("local", "ring")),
    "a large layer, adam": Plant(script=large(optimizer=ADAM), rows=("local", "ring")),
}

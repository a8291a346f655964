"""Evidence of a run in which nothing was violated, for tests that plant a violation."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.campaign.evidence import Act, Ended, Evidence, Look, State, Trail
from tests.campaign.ledger import ROWS
from tests.campaign.resources import Held
from tests.campaign.scenario import STEPS, Scenario

HELD = Held(descriptors=30, threads=10, sockets=4, memory=2**25)


def scenario(mode: str = "bsp", fault: str = "cut", place: str = "data") -> Scenario:
    standby = place in ("guarded shard", "guarded coordinator", "standby", "guardian")
    return Scenario(
        7, mode, "zmq", 2, 1, standby, fault, place, 1, "between", 16, 0.0, False, "server", 1, 0.5
    )


def state(mode: str = "bsp") -> State:
    values = torch.zeros(ROWS, 2)
    values[:STEPS] = 0.5 if mode == "bsp" else 1.0
    return {"ledger": values, "network.0.weight": torch.ones(4)}


def act(mode: str = "bsp") -> Act:
    names = ["rank-0-1", "rank-1-1"]
    looks = tuple(Look(step, 0.1, (step + 1, step + 1)) for step in range(STEPS))
    return Act(
        (Ended("server-1", 0), *(Ended(name, 0) for name in names)),
        {name: Trail(rank, looks) for rank, name in enumerate(names)},
        {name: state(mode) for name in names},
        state(mode),
        STEPS,
        2 * STEPS if mode == "backup" else STEPS,
        {"finished": [0, 1], "failovers": 1},
    )


def evidence(mode: str = "bsp", fault: str = "cut", place: str = "data") -> Evidence:
    reference = state(mode) if mode == "bsp" else None
    resources = {"server-1": HELD}
    chosen = scenario(mode, fault, place)
    return Evidence(chosen, True, 10**6, (act(mode),), reference, before=resources, after=resources)


def with_act(given: Evidence, **changes: object) -> Evidence:
    """Returns the evidence with another last act."""
    return replace(given, acts=(*given.acts[:-1], replace(given.last, **changes)))  # type: ignore[arg-type]


def with_program(given: Evidence, number: int, **changes: object) -> Evidence:
    """Returns the evidence with another end of one program of the last act."""
    programs = list(given.last.programs)
    programs[number] = replace(programs[number], **changes)  # type: ignore[arg-type]
    return with_act(given, programs=tuple(programs))


def with_look(given: Evidence, **changes: object) -> Evidence:
    """Returns the evidence with another last look of rank 0."""
    name, trail = next(iter(given.last.trails.items()))
    looks = (*trail.looks[:-1], replace(trail.looks[-1], **changes))  # type: ignore[arg-type]
    return with_act(given, trails={**given.last.trails, name: Trail(trail.rank, looks)})

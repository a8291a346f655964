"""Each invariant holds for a good run, and is violated by a planted fault."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from msgspec.structs import replace

from tests.campaign.evidence import Act, Ended, Evidence, Look, State, Trail
from tests.campaign.invariants import violations
from tests.campaign.ledger import ROWS
from tests.campaign.resources import Held
from tests.campaign.scenario import STEPS, example

HELD = Held(descriptors=30, threads=10, sockets=4, memory=2**25)


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
    chosen = example(mode, fault, place)
    return Evidence(chosen, True, 10**6, (act(mode),), reference, before=resources, after=resources)


def with_act(given: Evidence, **changes: object) -> Evidence:
    """Returns the evidence with another last act."""
    return replace(given, acts=(*given.acts[:-1], replace(given.last, **changes)))


def with_program(given: Evidence, number: int, **changes: object) -> Evidence:
    """Returns the evidence with another end of one program of the last act."""
    programs = list(given.last.programs)
    programs[number] = replace(programs[number], **changes)
    return with_act(given, programs=tuple(programs))


def with_look(given: Evidence, **changes: object) -> Evidence:
    """Returns the evidence with another last look of rank 0."""
    name, trail = next(iter(given.last.trails.items()))
    looks = (*trail.looks[:-1], replace(trail.looks[-1], **changes))
    return with_act(given, trails={**given.last.trails, name: Trail(trail.rank, looks)})


GOOD = "rank 1 was killed; restart the worker with --rank 1"


def changed(row: int, rank: int, value: float, mode: str = "bsp") -> State:
    found = {name: tensor.clone() for name, tensor in state(mode).items()}
    found["ledger"][row, rank] = value
    return found


def network(value: float) -> Mapping[str, State]:
    return {"rank-0-1": {**state(), "network.0.weight": torch.full((4,), value)}}


@pytest.mark.parametrize("mode", ["bsp", "ssp", "asp", "backup"])
def test_a_good_run_violates_nothing(mode: str) -> None:
    assert violations(evidence(mode)) == {}
    assert violations(evidence(mode, "kill", "guarded shard")) == {}


def slot(value: float, fault: str = "cut", place: str = "data") -> Evidence:
    """A push counts so often."""
    return with_act(evidence("asp", fault, place), checkpoint=changed(3, 1, value, "asp"))


def unreplaced() -> Evidence:
    return with_act(evidence("asp", "freeze", "guarded shard"), summary={"finished": [0, 1], "failovers": 0})


def failed(error: str, code: int = 69, said: str = "") -> Evidence:
    """Rank 1 was killed, and rank 0 fails with an error."""
    given = with_program(evidence("bsp", "kill", "worker"), 2, code=-9, victim=True)
    given = with_program(given, 0, code=1, error=GOOD)
    return with_program(given, 1, code=code, error=error, said=said)


def replaced(**changes: object) -> Evidence:
    """Rank 1 was killed after step 20, and another worker took its place in step 30."""
    given = with_program(evidence("asp", "kill", "worker"), 2, code=-9, victim=True)
    looks = given.last.trails["rank-1-1"].looks
    late = replace(given.last.programs[2], name="rank-1-1-again", code=0, victim=False, late=True)
    trails = {"rank-1-1": Trail(1, looks[:20]), "rank-1-1-again": Trail(1, looks[30:])}
    values = {name: tensor.clone() for name, tensor in state("asp").items()}
    values["ledger"][20:30, 1] = 0
    given = with_act(given, programs=(*given.last.programs, late), trails={**given.last.trails, **trails})
    return with_act(given, **{"states": {}, "checkpoint": values, **changes})


def older() -> State:
    """What a checkpoint of the last but one round has."""
    values = {name: tensor.clone() for name, tensor in state("backup").items()}
    values["ledger"][STEPS - 1] = 0
    return values


def empty_round() -> State:
    values = changed(3, 0, 0.0)
    values["ledger"][3] = 0
    return values


def refused(checkpoints: int) -> Evidence:
    """The server refuses its damaged checkpoint."""
    given = with_program(evidence("asp", "torn file", "disk"), 0, code=78, error=GOOD)
    return replace(given, checkpoints=checkpoints)


def grown(**more: int) -> Evidence:
    return replace(evidence(), after={"server-1": replace(HELD, **more)})


PLANTED = {
    "a fault that did not fire": ("valid", replace(evidence(), fired=False)),
    "a run without steps": ("valid", with_act(evidence(), trails={})),
    "no bytes through the relays": ("valid", replace(evidence(), forwarded=10)),
    "a cut that ends a worker": ("goes on", with_program(evidence(), 1, code=69, error=GOOD)),
    **{
        f"a killed {place} that ends a worker": (
            "goes on",
            with_program(evidence("asp", "kill", place), 1, code=69, error=GOOD),
        )
        for place in ("guarded shard", "guarded coordinator", "standby", "guardian")
    },
    "a shard that no standby replaced": ("goes on", unreplaced()),
    "a push that a standby does not have": ("I1", slot(0, "kill", "guarded shard")),
    "a lost push": ("I1", slot(0)),
    "a lost push of a worker that was killed and replaced": (
        "I1",
        replaced(checkpoint=changed(3, 1, 0, "asp")),
    ),
    "a lost push of an asynchronous job that resumed": ("I1", slot(0, "kill", "shard")),
    "a push that counts twice": ("I2", slot(2)),
    "a push in part": ("I2", slot(0.5)),
    "a round that applied nothing": ("I2", with_act(evidence(), states={"rank-0-1": empty_round()})),
    "a share of no round": ("I2", with_act(evidence("backup"), checkpoint=changed(3, 1, 0.7, "backup"))),
    "a share that is too large": ("I2", with_act(evidence(), checkpoint=changed(3, 1, 1.0))),
    "a round that counts twice": ("I2", with_act(evidence("backup"), checkpoint_rounds=2 * STEPS - 1)),
    "a round that is lost": ("I2", with_act(evidence("backup"), checkpoint_rounds=2 * STEPS + 1)),
    "a bit that flipped on the wire": ("I2", with_act(evidence(), checkpoint=changed(99, 1, 1e-40))),
    "other bytes in a worker": ("I3", with_act(evidence(), states=network(1.0000001))),
    "other bytes in the checkpoint": ("I3", with_act(evidence(), checkpoint=network(2.0)["rank-0-1"])),
    "a step beyond its deadline": ("I4", with_look(evidence(), seconds=11.5)),
    "a program that never ends": ("I4", with_program(evidence(), 1, code=None)),
    "an error without a peer": ("I5", failed("the connection was lost; restart the job")),
    "an error without a fix": ("I5", failed("rank 1 was killed")),
    "a traceback": ("I5", failed(GOOD, said="vm | Traceback (most recent call last):\nvm |   x\nvm | E: y")),
    "descriptors that stay open": ("I6", grown(descriptors=40)),
    "threads that stay": ("I6", grown(threads=20)),
    "memory that stays": ("I6", grown(memory=2**28)),
    "a read that goes backward": ("I7", with_look(evidence(), backward=1)),
    "a push that its sender does not see": ("I7", with_look(evidence(), seen=(3, 40))),
    "a worker that finishes a failed job": ("I8", with_program(evidence(), 0, code=69, error=GOOD)),
    "a worker that the server lost": ("I8", with_act(evidence(), summary={"finished": [1]})),
    "an end without a checkpoint": ("I8", with_act(evidence(), checkpoint=None, checkpoint_step=-1)),
    "an end with an old checkpoint": ("I8", with_act(evidence(), checkpoint_step=32)),
    "an end with a checkpoint older than a worker": ("I8", with_act(evidence("backup"), checkpoint=older())),
    "a refused checkpoint beside a good one": ("goes on", refused(checkpoints=2)),
    "an unknown exit code": ("I8", failed(GOOD, code=3)),
}


def test_a_round_without_a_lost_worker_violates_nothing() -> None:
    values = changed(3, 1, 0.0)
    values["ledger"][3, 0] = 1.0
    assert "I2" not in violations(with_act(evidence("bsp", "kill", "worker"), checkpoint=values))


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_found(name: str) -> None:
    invariant, given = PLANTED[name]
    assert invariant in violations(given)


def test_rounds_that_the_first_job_was_ahead_count_in_the_job_that_resumes() -> None:
    given = evidence("backup", "terminate", "coordinator")
    first = replace(given.last, checkpoint_rounds=given.last.checkpoint_step + 1)
    first = replace(first, checkpoint=None, states={})
    ahead = with_act(replace(given, acts=(first, given.last)), checkpoint_rounds=2 * STEPS - 1)
    assert "I2" not in violations(ahead)
    assert "I2" in violations(with_act(ahead, checkpoint_rounds=2 * STEPS))


def test_a_worker_and_its_replacement_miss_no_push() -> None:
    assert violations(replaced()) == {}


def test_a_server_may_refuse_its_only_checkpoint_if_that_is_damaged() -> None:
    assert "goes on" not in violations(refused(checkpoints=1))


def test_an_error_with_peer_cause_and_fix_is_no_violation() -> None:
    assert "I5" not in violations(failed(GOOD))


def test_a_lost_worker_may_fail_and_the_others_may_not() -> None:
    given = with_program(evidence("asp", "freeze", "worker"), 2, code=75, victim=True)
    assert "goes on" not in violations(given)
    assert "goes on" in violations(with_program(given, 1, code=69, error=GOOD))


def test_a_resumed_job_counts_instead_of_the_one_that_ended() -> None:
    given = evidence("bsp", "kill", "shard")
    ended: Act = with_program(with_program(given, 0, code=69, error=GOOD), 1, code=69, error=GOOD).last
    ended = replace(ended, programs=(*ended.programs[:2], replace(ended.programs[2], code=69, error=GOOD)))
    both = replace(given, acts=(replace(ended, states={}, checkpoint=None), *given.acts))
    assert violations(both) == {}
    assert "goes on" in violations(replace(both, acts=both.acts[:1]))

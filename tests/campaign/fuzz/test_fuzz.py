"""A job that receives garbage on every port lives, keeps its memory, and trains to the same bytes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.campaign.fuzz.garbage import STREAMS, frame, header, packet
from tests.campaign.invariants import violations
from tests.campaign.play import play
from tests.campaign.scenario import Scenario, undisturbed
from tests.support.processes.fork_server import ForkServer


@pytest.mark.parametrize("kind", [*STREAMS, header, frame, packet], ids=lambda kind: kind.__name__)
def test_a_seed_repeats_its_garbage(kind: object) -> None:
    assert callable(kind)
    first, second = ([kind(draw) for _ in range(50)] for draw in (random.Random(1), random.Random(1)))
    assert first == second
    assert len(set(first)) > 10


def attacked(mode: str, wire: str) -> Scenario:
    """Returns a run with a fixed seed."""
    return Scenario(
        1, mode, wire, 2, 0 if mode == "ring" else 1, False, "garbage", "ports", 0, "within", 16, 0.0, False,
        "server", 1, 0.0,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mode", "wire"), [("bsp", "shm"), ("bsp", "zmq"), ("bsp", "grpc"), ("ring", "gloo")]
)
def test_a_job_trains_on_while_every_port_receives_garbage(
    tmp_path: Path, fork_server: ForkServer, mode: str, wire: str
) -> None:
    scenario = attacked(mode, wire)
    calm, disturbed = tmp_path / "calm", tmp_path / "disturbed"
    calm.mkdir()
    disturbed.mkdir()
    reference = play(replace(undisturbed(scenario), wire=wire), calm, fork_server).last.states["rank-0-1"]
    evidence = play(scenario, disturbed, fork_server, reference)
    found = violations(evidence)
    found.pop("I5", None)  # gRPC logs a traceback for each request that it cannot read
    assert found == {}

"""Recorded steps stay in their files while they are judged; those of parts are judged as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hubring.workers.audit.audit_file import AuditStep, ModelLayout
from hubring.workers.compare.gate import recorded_steps, synchronous_steps
from hubring.workers.compare.gate.recorded_steps import RecordedStep, read
from hubring.workers.compare.gate.same_parameters import STEP_TOLERANCE
from hubring.workers.compare.gate.step_reference import Checked
from hubring.workers.compare.run.outcome import audit_file
from tests.support.compare.audited import Script, Trained, train


@pytest.fixture(scope="module")
def trained() -> Trained:
    return train("local", Script())


@pytest.fixture
def steps(trained: Trained, tmp_path: Path) -> list[RecordedStep]:
    for rank in range(len(trained.records)):
        (tmp_path / f"record {rank}.jsonl").touch()
    trained.save(tmp_path)
    return read(audit_file(tmp_path, 0)).trainers[0]


def mapped(path: Path) -> range:
    """Returns the addresses at which a file is mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            return range(*(int(end, 16) for end in line.split()[0].split("-")))
    return range(0)


def test_elements_are_not_copied_from_the_file(steps: list[RecordedStep], tmp_path: Path) -> None:
    there = mapped(audit_file(tmp_path, 0))
    for step in steps:
        for tensor in (step.own, step.arrived, step.given, step.before, step.after):
            assert tensor is not None
            assert tensor.data_ptr() in there


def test_judging_does_not_change_what_was_read(
    trained: Trained, steps: list[RecordedStep], tmp_path: Path
) -> None:
    before = audit_file(tmp_path, 0).read_bytes()
    (fresh,) = (rank.trainers[0] for rank in trained.ranks)
    checked = synchronous_steps.check([{0: steps}], STEP_TOLERANCE)
    assert checked.complete
    assert all(torch.equal(one.own, other.own) for one, other in zip(steps, fresh, strict=True))
    assert audit_file(tmp_path, 0).read_bytes() == before


OWN = torch.tensor([[1.0, 2.0, 3.0], [3.0, 6.0, 5.0]])
BEFORE = torch.tensor([1.0, 1.0, 1.0])
HELD = torch.tensor([[1, 1, 0], [0, 0, 1]])
RATE = 0.1


def recording(rank: int, arrived: torch.Tensor, after: torch.Tensor) -> recorded_steps.Recording:
    def content(values: torch.Tensor) -> bytes:
        return values.float().numpy().tobytes()

    held = HELD[rank]
    layout = ModelLayout(
        trainer=0,
        rank=rank,
        optimizer="SGD",
        steps_on="worker",
        names=["w"],
        dtypes=["float32"],
        counts=[3],
        groups=[0],
        held=held.to(torch.uint8).numpy().tobytes(),
    )
    step = AuditStep(
        trainer=0,
        step=1,
        groups=[{"lr": RATE, "momentum": 0.0}],
        divisor=1.0,
        script_inside=False,
        own=content(OWN[rank]),
        owns=b"\1",
        arrived=content(arrived * held),
        given=b"",
        gives=b"\1",
        before=content(BEFORE * held),
        after=content(after * held),
    )
    return recorded_steps.recorded([layout, step])


def check(arrived: torch.Tensor, after: torch.Tensor) -> Checked:
    ranks = recorded_steps.joined([recording(rank, arrived, after) for rank in range(2)])
    return synchronous_steps.check([rank.trainers for rank in ranks], 1e-4)


def test_a_wrong_part_of_an_update_is_its_ranks() -> None:
    mean, wrong = OWN.mean(0), torch.tensor([0.0, 0.0, 0.01])
    checked = check(mean, BEFORE - RATE * mean + wrong)
    assert "rank 1" in checked.fault


def test_a_wrong_part_of_a_gradient_is_found() -> None:
    mean = OWN.mean(0) + torch.tensor([0.0, 0.5, 0.0])
    checked = check(mean, BEFORE - RATE * mean)
    assert "gradient" in checked.fault
    assert "rank 0" in checked.fault

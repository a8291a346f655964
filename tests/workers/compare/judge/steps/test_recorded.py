"""Recorded steps stay in their files while they are judged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hubring.workers.compare.judge.gate import STEP_TOLERANCE
from hubring.workers.compare.judge.steps import synchronous
from hubring.workers.compare.judge.steps.recorded import RecordedStep, read
from hubring.workers.compare.judge.steps.reference import units_of
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


def test_steps_share_which_parameters_have_gradients(steps: list[RecordedStep]) -> None:
    assert len({id(step.owns) for step in steps}) == 1
    assert len({id(step.gives) for step in steps}) == 1


def test_judging_does_not_change_what_was_read(
    trained: Trained, steps: list[RecordedStep], tmp_path: Path
) -> None:
    before = audit_file(tmp_path, 0).read_bytes()
    (fresh,) = (rank.trainers[0] for rank in trained.ranks)
    checked = synchronous.check([{0: steps}], STEP_TOLERANCE)
    assert checked.complete
    assert all(torch.equal(one.own, other.own) for one, other in zip(steps, fresh, strict=True))
    assert audit_file(tmp_path, 0).read_bytes() == before


def test_units_need_each_history_once() -> None:
    taken = list[int]()

    def histories() -> Iterator[Tensor]:
        for number in range(1000):
            taken.append(number)
            yield torch.tensor([0, 0, -1 if number % 2 else 0])

    units = units_of(["float32"] * 3, torch.arange(3), histories())
    assert [unit.elements.tolist() for unit in units] == [[0, 1], [2]]
    assert len(taken) == 1000

"""Steps of ranks that hold parts of a parameter are judged as a whole, and a fault names its rank."""

from __future__ import annotations

import torch

from hubring.workers.audit.audit_file import ModelLayout, Step
from hubring.workers.compare.judge.steps import recorded, synchronous
from hubring.workers.compare.judge.steps.checked import Checked

OWN = torch.tensor([[1.0, 2.0, 3.0], [3.0, 6.0, 5.0]])
BEFORE = torch.tensor([1.0, 1.0, 1.0])
HELD = torch.tensor([[1, 1, 0], [0, 0, 1]])
RATE = 0.1


def recording(rank: int, arrived: torch.Tensor, after: torch.Tensor) -> recorded.Recording:
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
    step = Step(
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
    return recorded.recorded([layout, step])


def check(arrived: torch.Tensor, after: torch.Tensor) -> Checked:
    ranks = recorded.joined([recording(rank, arrived, after) for rank in range(2)])
    return synchronous.check([rank.trainers for rank in ranks], 1e-4)


def test_parts_of_all_ranks_are_one_step() -> None:
    mean = OWN.mean(0)
    checked = check(mean, BEFORE - RATE * mean)
    assert (checked.judged, checked.unjudged, checked.fault) == (1, "", "")


def test_a_wrong_part_of_an_update_is_its_ranks() -> None:
    mean, wrong = OWN.mean(0), torch.tensor([0.0, 0.0, 0.01])
    checked = check(mean, BEFORE - RATE * mean + wrong)
    assert "rank 1" in checked.fault


def test_a_wrong_part_of_a_gradient_is_found() -> None:
    mean = OWN.mean(0) + torch.tensor([0.0, 0.5, 0.0])
    checked = check(mean, BEFORE - RATE * mean)
    assert "gradient" in checked.fault
    assert "rank 0" in checked.fault


def test_ordinary_recordings_stay_as_they_are() -> None:
    ranks = [recorded.Recording({}, frozenset()), recorded.Recording({}, frozenset())]
    assert recorded.joined(ranks) == ranks

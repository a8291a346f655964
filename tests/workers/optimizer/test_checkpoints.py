"""What rank 0 keeps where workers step themselves, and how all ranks get it back."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hubring.ps.checkpoint.checkpoint_folder import Manifest, begin, publish
from hubring.ps.core.errors import ConfigError, NonFinite
from hubring.workers.collectives import barrier
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.optimizer.checkpoints import Checkpoints
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.support.training.ranks import RingRanks


def optimizer_of(
    model: nn.Module | None = None, kind: Callable[..., torch.optim.Optimizer] = torch.optim.Adam
) -> DistributedOptimizer:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    return DistributedOptimizer(kind(model.parameters(), lr=0.1), model, communicator=LocalCommunicator())


def train(optimizer: DistributedOptimizer, steps: int) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        loss: Any = sum(one.square().sum() for one in optimizer.named_parameters.values())
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


_made: list[Checkpoints] = []


def checkpoints(folder: Path, communicator: Communicator | None = None, every: float = 1e6) -> Checkpoints:
    made = Checkpoints(folder, every, communicator or LocalCommunicator(), "train.py")
    _made.append(made)
    return made  # not the last: each rank has a thread


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _made:
        _made.pop().close()


def trained_for(
    steps: int, folder: Path, communicator: Communicator | None = None, every: float = 1e6, **options: Any
) -> tuple[Checkpoints, DistributedOptimizer]:
    keeps, trained = checkpoints(folder, communicator, every), optimizer_of(**options)
    keeps.adopt(trained)
    train(trained, steps)
    return keeps, trained


@pytest.fixture
def saved(tmp_path: Path) -> DistributedOptimizer:
    keeps, trained = trained_for(5, tmp_path)
    keeps.save()
    return trained


def test_all_ranks_get_the_state_of_rank_0_which_alone_reads(
    tmp_path: Path, saved: DistributedOptimizer
) -> None:
    def resume(communicator: Communicator) -> tuple[int, dict[int, dict[str, Tensor]]]:
        resumed = optimizer_of()
        keeps = checkpoints(tmp_path if communicator.rank == 0 else tmp_path / "nowhere", communicator)
        keeps.load(resumed)
        return keeps.share(resumed), resumed.wrapped.state_dict()["state"]

    expected = saved.wrapped.state_dict()["state"]
    for step, state in RingRanks().run(resume):
        assert step == 5
        assert state.keys() == expected.keys()
        for index, values in expected.items():
            assert all(torch.equal(state[index][name], value) for name, value in values.items())


def test_a_ring_in_the_folder_of_a_hub_says_that_it_starts_afresh(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(begin(tmp_path), Manifest("job", "bsp", 7, 1, (), (), ()))
    checkpoints(tmp_path)
    assert f"starts at step 0: the checkpoint of step 7 in {tmp_path} is a hub's" in caplog.text


def test_a_damaged_checkpoint_is_found_out_and_the_one_before_is_used(tmp_path: Path) -> None:
    keeps, trained = trained_for(2, tmp_path)
    keeps.save()
    train(trained, 2)
    keeps.save()
    newest = sorted((tmp_path / "workers").glob("*-step-4/*.safetensors"))[-1]
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    again, other = checkpoints(tmp_path), optimizer_of()
    again.load(other)
    assert again.share(other) == 2


def test_a_state_that_is_no_tensor_or_number_is_refused(tmp_path: Path) -> None:
    keeps, _ = trained_for(1, tmp_path, kind=torch.optim.LBFGS)
    with pytest.raises(ConfigError, match="LBFGS has a list"):
        keeps.save()
    assert [path.name for path in (tmp_path / "workers").iterdir()] == [".claim"]


def test_parameters_that_are_not_finite_are_not_saved(tmp_path: Path, saved: DistributedOptimizer) -> None:
    keeps, trained = checkpoints(tmp_path, every=1e-9), saved
    keeps.adopt(trained)
    train(trained, 1)
    with torch.no_grad():
        trained.named_parameters["0.weight"][1, 2] = torch.nan
    with pytest.raises(NonFinite, match=r"0\.weight \[3, 4\] holds nan after step 6"):
        keeps.save_in_passing()
    resumed = optimizer_of()
    checkpoints(tmp_path).load(resumed)
    assert all(tensor.isfinite().all() for tensor in resumed.model_state.values())


def test_a_failed_background_checkpoint_is_logged_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeps, _ = trained_for(1, tmp_path, every=3600.0)
    keeps._saved_at -= 3600.0
    shutil.rmtree(tmp_path / "workers")
    (tmp_path / "workers").write_text("in the way")
    with caplog.at_level("ERROR"):
        for _ in range(2):
            keeps.save_in_passing()
    assert caplog.text.count("checkpoint not saved: cannot write") == 1


def test_after_a_failure_no_rank_waits_for_the_same_step_again(tmp_path: Path) -> None:
    def save_twice(communicator: Communicator) -> int:
        keeps, _ = trained_for(1, tmp_path, communicator)
        failures = 0
        if communicator.rank == 0:
            shutil.rmtree(tmp_path / "workers")
            (tmp_path / "workers").write_text("in the way")
        for _ in range(2):
            try:
                keeps.save()
            except ConfigError:
                failures += 1
        barrier(communicator=communicator)
        return failures

    assert RingRanks().run(save_twice) == [2, 0, 0]


def test_ranks_look_whether_a_checkpoint_is_due_at_the_pace_of_the_faster_optimizer(tmp_path: Path) -> None:
    def look(communicator: Communicator) -> float:
        keeps, generator, critic = checkpoints(tmp_path, communicator), optimizer_of(), optimizer_of()
        keeps.adopt(generator)
        keeps.adopt(critic)
        generator._steps, critic._steps = 10, 50
        keeps.save_in_passing()
        return keeps.due_at

    assert RingRanks().run(look) == [51.0] * 3


def test_an_optimizer_that_is_made_anew_many_times_is_kept_once(tmp_path: Path) -> None:
    keeps, model = checkpoints(tmp_path), nn.Linear(2, 1)
    gone = []
    for _ in range(3):
        trained = optimizer_of(model)
        keeps.load(trained)
        keeps.adopt(trained)
        gone.append(weakref.ref(trained))
    del trained
    assert [one() is not None for one in gone] == [False, False, True]


def test_a_later_optimizer_of_the_same_parameters_continues_as_they_are(
    tmp_path: Path, saved: DistributedOptimizer
) -> None:
    keeps, model = checkpoints(tmp_path), nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    first = optimizer_of(model)
    keeps.load(first)
    keeps.adopt(first)
    train(first, 1)
    later = optimizer_of(model)
    keeps.load(later)
    assert keeps.share(later) == 0
    assert not torch.equal(first.model_state["0.weight"], saved.model_state["0.weight"])

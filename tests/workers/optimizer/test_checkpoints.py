"""What rank 0 keeps where workers step themselves, and how all ranks get it back."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hubring.ps.core.errors import ConfigError, NonFinite
from hubring.workers.collectives import barrier
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.optimizer.checkpoints import Checkpoints
from hubring.workers.optimizer.own_state import ModelRest
from tests.support.training.ranks import RingRanks


class Trained:
    """A model and its optimizer, as `DistributedOptimizer` shows them."""

    def __init__(self, kind: Callable[..., torch.optim.Optimizer] = torch.optim.Adam) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.wrapped = kind(self.model.parameters(), lr=0.1)
        self.completed_steps = 0
        self.inherited = False

    @property
    def rest(self) -> ModelRest:
        return self

    def buffers(self) -> Mapping[str, Tensor]:
        return dict(self.model.named_buffers())

    def frozen(self) -> Mapping[str, Tensor]:
        return {}

    def settle(self) -> None:
        pass

    @property
    def named_parameters(self) -> Mapping[str, Tensor]:
        return dict(self.model.named_parameters())

    @property
    def model_state(self) -> Mapping[str, Tensor]:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: one.detach() for name, one in named}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.completed_steps))

            def closure(inputs: Tensor = inputs) -> float:
                self.wrapped.zero_grad()
                loss = self.model(inputs).square().mean()
                loss.backward()
                return loss.item()

            self.wrapped.step(closure)
            self.completed_steps += 1


_made: list[Checkpoints] = []


def checkpoints(folder: Path, communicator: Communicator | None = None, every: float = 1e6) -> Checkpoints:
    _made.append(Checkpoints(folder, every, communicator or LocalCommunicator(), "train.py"))
    return _made[-1]


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _made:
        _made.pop().close()


def trained_for(
    steps: int, folder: Path, communicator: Communicator | None = None, every: float = 1e6, **options: Any
) -> tuple[Checkpoints, Trained]:
    keeps, trained = checkpoints(folder, communicator, every), Trained(**options)
    keeps.adopt(trained)
    trained.train(steps)
    return keeps, trained


@pytest.fixture
def saved(tmp_path: Path) -> Trained:
    keeps, trained = trained_for(5, tmp_path)
    keeps.save()
    return trained


def test_all_ranks_get_the_state_of_rank_0_which_alone_reads(tmp_path: Path, saved: Trained) -> None:
    def resume(communicator: Communicator) -> tuple[int, dict[int, dict[str, Tensor]]]:
        resumed = Trained()
        keeps = checkpoints(tmp_path if communicator.rank == 0 else tmp_path / "nowhere", communicator)
        keeps.load(resumed)
        return keeps.share(resumed), resumed.wrapped.state_dict()["state"]

    expected = saved.wrapped.state_dict()["state"]
    for step, state in RingRanks().run(resume):
        assert step == 5
        assert state.keys() == expected.keys()
        for index, values in expected.items():
            assert all(torch.equal(state[index][name], value) for name, value in values.items())


def test_a_damaged_checkpoint_is_found_out_and_the_one_before_is_used(tmp_path: Path) -> None:
    keeps, trained = trained_for(2, tmp_path)
    keeps.save()
    trained.train(2)
    keeps.save()
    newest = sorted((tmp_path / "workers").glob("*-step-4/*.safetensors"))[-1]
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    again, other = checkpoints(tmp_path), Trained()
    again.load(other)
    assert again.share(other) == 2


def test_a_state_that_is_no_tensor_or_number_is_refused(tmp_path: Path) -> None:
    keeps, _ = trained_for(1, tmp_path, kind=torch.optim.LBFGS)
    with pytest.raises(ConfigError, match="LBFGS has a list"):
        keeps.save()
    assert [path.name for path in (tmp_path / "workers").iterdir()] == [".claim"]


def test_parameters_that_are_not_finite_are_not_saved(tmp_path: Path, saved: Trained) -> None:
    keeps, trained = checkpoints(tmp_path, every=1e-9), saved
    keeps.adopt(trained)
    trained.train(1)
    with torch.no_grad():
        trained.model.get_parameter("0.weight")[1, 2] = torch.nan
    with pytest.raises(NonFinite, match=r"0\.weight \[3, 4\] holds nan after step 6"):
        keeps.save_in_passing()
    resumed = Trained()
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
        keeps, generator, critic = checkpoints(tmp_path, communicator), Trained(), Trained()
        keeps.adopt(generator)
        keeps.adopt(critic)
        generator.completed_steps, critic.completed_steps = 10, 50
        keeps.save_in_passing()
        return keeps.due_at

    assert RingRanks().run(look) == [51.0] * 3


def test_an_optimizer_that_is_made_anew_many_times_is_kept_once(tmp_path: Path) -> None:
    keeps, model = checkpoints(tmp_path), Trained()
    gone = []
    for _ in range(3):
        trained = Trained()
        trained.model = model.model
        keeps.load(trained)
        keeps.adopt(trained)
        gone.append(weakref.ref(trained))
    del trained
    assert [one() is not None for one in gone] == [False, False, True]


def test_a_later_optimizer_of_the_same_parameters_continues_as_they_are(
    tmp_path: Path, saved: Trained
) -> None:
    keeps, first, later = checkpoints(tmp_path), Trained(), Trained()
    keeps.load(first)
    keeps.adopt(first)
    later.model = first.model
    first.train(1)
    keeps.load(later)
    assert keeps.share(later) == 0
    assert not torch.equal(first.model_state["0.weight"], saved.model_state["0.weight"])

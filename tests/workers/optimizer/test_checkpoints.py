"""What rank 0 keeps where workers step themselves, and how all ranks get it back."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hubring.ps.core.errors import ConfigError, NonFinite
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.local import LocalCommunicator
from hubring.workers.optimizer.checkpoints import Checkpoints
from tests.support.training.ranks import RingRanks


class Trained:
    """A model and its optimizer, as `DistributedOptimizer` shows them."""

    def __init__(self, kind: Callable[..., torch.optim.Optimizer] = torch.optim.Adam, width: int = 3) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        self.wrapped = kind(self.model.parameters(), lr=0.1)
        self.completed_steps = 0

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


@pytest.fixture
def saved(tmp_path: Path) -> Trained:
    trained = Trained()
    keeps = checkpoints(tmp_path)
    keeps.adopt(trained)
    trained.train(5)
    keeps.save()
    return trained


def test_a_resumed_run_takes_the_steps_of_the_one_before_bit_by_bit(tmp_path: Path, saved: Trained) -> None:
    resumed = Trained()
    keeps = checkpoints(tmp_path)
    keeps.load(resumed)
    resumed.completed_steps = keeps.share(resumed)
    assert resumed.completed_steps == 5
    for trained in (saved, resumed):
        trained.train(3)
    assert resumed.model_state.keys() == saved.model_state.keys()
    assert all(torch.equal(resumed.model_state[name], saved.model_state[name]) for name in saved.model_state)


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


def test_without_a_checkpoint_training_begins(tmp_path: Path) -> None:
    trained = Trained()
    keeps = checkpoints(tmp_path)
    keeps.load(trained)
    assert keeps.share(trained) == 0


def test_a_damaged_checkpoint_is_found_out_and_the_one_before_is_used(tmp_path: Path) -> None:
    trained, keeps = Trained(), checkpoints(tmp_path)
    keeps.adopt(trained)
    for _ in range(2):
        trained.train(2)
        keeps.save()
    newest = sorted((tmp_path / "workers").glob("*-step-4/*.safetensors"))[-1]
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    again, other = checkpoints(tmp_path), Trained()
    again.load(other)
    assert again.share(other) == 2


def test_another_model_is_refused_with_the_first_difference(tmp_path: Path, saved: Trained) -> None:
    words = r"'0.weight' is float32\[3, 4\] in the checkpoint and float32\[2, 4\] in this model"
    with pytest.raises(ConfigError, match=words):
        checkpoints(tmp_path).load(Trained(width=2))


def test_a_state_that_is_no_tensor_or_number_is_refused(tmp_path: Path) -> None:
    trained, keeps = Trained(torch.optim.LBFGS), checkpoints(tmp_path)
    keeps.adopt(trained)
    trained.train(1)
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


def test_what_fails_in_passing_is_told_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained = Trained()
    keeps = checkpoints(tmp_path, every=1e-9)
    keeps.adopt(trained)
    trained.train(1)
    assert keeps.due
    shutil.rmtree(tmp_path / "workers")
    (tmp_path / "workers").write_text("in the way")
    with caplog.at_level("ERROR"):
        keeps.save_in_passing()
    assert "checkpoint not saved: cannot write" in caplog.text


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

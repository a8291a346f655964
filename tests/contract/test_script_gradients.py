"""What a script does to gradients, in any number of backward passes, has torch's effect."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from hubring.ps.core.errors import ConfigError, HubringError
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.contract.awkward import (
    KINDS,
    NUMPY,
    STEPPING_HERE,
    assert_as_one,
    backward,
    batches,
    ends,
    gradient,
    layers,
    made,
    mean,
    momentum,
    parts,
    step,
    values,
    wrapped,
)
from tests.support.training.ranks import Ranks

# S4: gradients that the script keeps.


@KINDS
@pytest.mark.parametrize("keep", [lambda g: g, lambda g: g.view(-1), lambda g: g.detach()])
def test_gradients_that_the_script_keeps_are_not_overwritten(
    kind: type[Ranks], keep: Callable[[Tensor], Tensor]
) -> None:
    """As in gradient surgery: the second gradient is corrected by the first."""

    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator, overlap=False)
        for batch in batches():
            optimizer.zero_grad()
            backward(model, batch, communicator)
            first = [keep(gradient(one)) for one in model.parameters()]
            optimizer.zero_grad()
            backward(model, batch * 2, communicator)
            for own, one in zip(first, model.parameters(), strict=True):
                gradient(one).add_(own.view_as(one), alpha=0.5)
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


# S7: accumulation that ends early.


@STEPPING_HERE
def test_an_accumulation_that_ends_early_is_a_mean_after_synchronize(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator, backward_passes_per_step=4)
        for batch in batches():
            optimizer.zero_grad()
            for _ in range(2):
                backward(model, batch, communicator)
            if isinstance(optimizer, DistributedOptimizer):
                optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


@STEPPING_HERE
def test_clipping_an_accumulation_that_ended_early_is_refused(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator, backward_passes_per_step=4)
        backward(model, batches()[0], communicator)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        return []

    with pytest.raises(ConfigError, match=r"optimizer\.synchronize\(\)"):
        ends(kind, train)


@KINDS
def test_an_accumulation_may_be_dropped_and_begun_anew(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator, backward_passes_per_step=2)
        for number, batch in enumerate(batches()):
            optimizer.zero_grad()
            backward(model, batch, communicator)
            if number == 2:
                continue  # the rest of the epoch is too short
            backward(model, batch, communicator)
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


# S8: gradients changed in ways that torch does not count.


@KINDS
@pytest.mark.parametrize("way", ["data", "replaced data", *NUMPY])
def test_gradients_changed_behind_torchs_back_count(kind: type[Ranks], way: str) -> None:
    """The same on both ranks and on their mean, since a hub gets each rank's own gradient."""

    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator)
        for batch in batches():
            optimizer.zero_grad()
            backward(model, batch, communicator)
            for one in model.parameters():
                own = gradient(one)
                if way == "data":
                    own.data.mul_(0.5)
                elif way == "numpy":
                    own.numpy()[...] *= 0.5
                else:
                    own.data = own.data * 0.5
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


# More than one backward pass.


@STEPPING_HERE
def test_backward_may_run_more_often_than_was_said(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator)
        for batch in batches():
            optimizer.zero_grad()
            backward(model, batch, communicator)
            backward(model, batch * 2, communicator)
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


@KINDS
@pytest.mark.parametrize("overlap", [True, False])
def test_reentrant_activation_checkpointing_trains_as_in_torch(kind: type[Ranks], overlap: bool) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        first, second, third = (made(nn.Linear(4, 4)) for _ in range(3))
        model = nn.Sequential(first, second, third)
        optimizer = momentum(model, communicator, overlap=overlap)
        for batch in batches():
            optimizer.zero_grad()
            losses = []
            for share in parts(batch, communicator):
                hidden = torch.utils.checkpoint.checkpoint(second, first(share), use_reentrant=True)
                losses.append(third(hidden).square().mean())
            mean(losses).backward()
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


@KINDS
@pytest.mark.parametrize("overlap", [True, False])
def test_a_layer_that_reentrant_checkpointing_runs_three_times_trains_as_in_torch(
    kind: type[Ranks], overlap: bool
) -> None:
    """Its parameters get three gradients in one backward pass."""

    def train(communicator: Communicator | None) -> list[Tensor]:
        first, body, head = (made(nn.Linear(4, 4)) for _ in range(3))
        model = nn.Sequential(first, body, head)
        optimizer = momentum(model, communicator, overlap=overlap)
        for batch in batches():
            optimizer.zero_grad()
            losses = []
            for share in parts(batch, communicator):
                hidden = first(share)
                for _ in range(3):
                    hidden = torch.utils.checkpoint.checkpoint(body, hidden, use_reentrant=True)
                losses.append(head(hidden).square().mean())
            mean(losses).backward()
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


@pytest.mark.differing
@KINDS
def test_a_second_gradient_after_the_first_was_sent_is_refused(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        first, body, head = (made(nn.Linear(4, 4)) for _ in range(3))
        optimizer = momentum(nn.Sequential(first, body, head), communicator)
        for number, batch in enumerate(batches()):
            hidden = first(batch)
            for _ in range(3 if number == 2 else 1):
                hidden = torch.utils.checkpoint.checkpoint(body, hidden, use_reentrant=True)
            optimizer.zero_grad()
            head(hidden).square().mean().backward()
            optimizer.step()
        return []

    with pytest.raises(ConfigError, match=r"got another gradient in one backward.*overlap=False"):
        ends(kind, train)


@KINDS
def test_a_penalty_on_the_gradient_trains_as_in_torch(kind: type[Ranks]) -> None:
    """Its gradient is that of this rank's own gradient, so the batch is the same on all ranks."""

    def train(communicator: Communicator | None) -> list[Tensor]:
        model = layers()
        optimizer = momentum(model, communicator, overlap=False)
        for batch in batches():
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            own = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            (loss + sum(one.square().sum() for one in own)).backward()
            optimizer.step()
        return values(model)

    assert_as_one(kind, train)


@STEPPING_HERE
def test_sparse_gradients_stay_sparse_for_an_optimizer_that_needs_them(kind: type[Ranks]) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        model = made(nn.EmbeddingBag(6, 2, sparse=True, mode="sum"))
        optimizer = wrapped(torch.optim.SparseAdam(model.parameters(), lr=0.1), model, communicator)
        for batch in batches():
            rows = (batch.abs() * 3).long().clamp(max=5)
            optimizer.zero_grad()
            mean([model(share).square().mean() for share in parts(rows, communicator)]).backward()
            optimizer.step()
        return values(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_as_one(kind, train)


# S5.


@pytest.mark.differing
@STEPPING_HERE
@pytest.mark.parametrize("dropped", [True, False])
def test_a_backward_that_only_one_rank_runs_ends_the_job(kind: type[Ranks], dropped: bool) -> None:
    def train(communicator: Communicator | None) -> list[Tensor]:
        assert communicator is not None
        model = layers()
        optimizer = momentum(model, communicator)
        for number, batch in enumerate([*batches(), *batches()]):
            if communicator.rank and number == 2:
                backward(model, batch, communicator)
                if dropped:
                    optimizer.zero_grad()
            step(model, optimizer, batch, communicator)
        return []

    with pytest.raises(HubringError, match=r"some rank ran backward more often"):
        ends(kind, train)

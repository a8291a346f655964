"""Unusual uses of autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.reports.report import EVERYWHERE, report
from tests.reports.training import (
    Job,
    adam,
    backward,
    batches,
    mlp,
    momentum,
    prepared,
    seeded,
    square,
    step,
    trained,
    trained_by,
    values,
)

# Activation checkpointing


def whole(model: nn.Sequential, part: Tensor, reentrant: bool) -> Any:
    return checkpoint(model, part, use_reentrant=reentrant)


def twice(model: nn.Sequential, part: Tensor, reentrant: bool) -> Any:
    return whole(model, whole(model, part, reentrant), reentrant)


def in_segments(model: nn.Sequential, part: Tensor, reentrant: bool) -> Any:
    return checkpoint_sequential(model, 2, part, use_reentrant=reentrant)


@report(
    "huggingface/transformers#23018, pytorch/pytorch#65537, allenai/longformer#63, microsoft/FocalNet#4,"
    " pytorch/pytorch#24005"
)
@pytest.mark.parametrize(("layers", "forward"), [(3, whole), (1, twice), (4, in_segments)])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
def test_activations_are_checkpointed(
    job: Job, reentrant: bool, layers: int, forward: Callable[..., Any]
) -> list[Tensor]:
    """`checkpoint`, reentrant or not, and `checkpoint_sequential`."""
    network = seeded(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)]))
    model, optimizer = prepared(job, network, timeout=5.0)
    return trained(
        job, model, optimizer, lambda part: forward(model, part.clone().requires_grad_(), reentrant)
    )


# Gradients of gradients


def a_critic() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 1)))


@report("Zeleni9/pytorch-wgan#20, pytorch/pytorch#63812")
def test_a_critics_gradient_with_respect_to_its_input_is_penalised(job: Job) -> list[Tensor]:
    """WGAN-GP."""
    critic, optimizer = prepared(job, a_critic(), adam)

    def penalised(part: Tensor) -> Tensor:
        part = part.detach().requires_grad_()
        score = critic(part)
        (slope,) = torch.autograd.grad(score.sum(), part, create_graph=True)
        return score.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()

    return trained_by(job, critic, optimizer, penalised, batches())


@report("pytorch/pytorch#47562")
def test_only_the_penalty_is_the_loss_and_the_last_bias_has_no_gradient(job: Job) -> list[Tensor]:
    """Only the penalty is the loss; a bias has no gradient."""
    critic, optimizer = prepared(job, a_critic())

    def penalty(part: Tensor) -> Tensor:
        part = part.detach().requires_grad_()
        (slope,) = torch.autograd.grad(critic(part).sum(), part, create_graph=True)
        return slope.square().mean()

    return trained_by(job, critic, optimizer, penalty, batches())


@report("pytorch/pytorch#63812", refused="hub aggregate ring", error="create_graph")
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_backward_goes_through_the_gradients_in_grad(job: Job) -> list[Tensor]:
    """`backward(create_graph=True)`, then a backward through `.grad`."""
    model, optimizer = prepared(job, mlp(), backward_passes_per_step=2)
    for batch in batches():
        optimizer.zero_grad()
        job.loss(batch, square(model)).backward(create_graph=True)
        slopes = [one.grad.square().sum() for one in model.parameters() if one.grad is not None]
        torch.stack(slopes).sum().backward()
        optimizer.step()
    return values(model)


@report("pytorch/pytorch#63812")
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_graph_of_the_gradients_is_made_and_not_used(job: Job) -> list[Tensor]:
    """`backward(create_graph=True)` alone."""
    model, optimizer = prepared(job, mlp())
    for batch in batches():
        optimizer.zero_grad()
        job.loss(batch, square(model)).backward(create_graph=True)
        optimizer.step()
    return values(model)


@report("Meta-learning")
def test_inner_steps_on_copies_of_the_weights(job: Job) -> list[Tensor]:
    """Inner steps with `functional_call`.

    As meta-learning does: the outer gradient goes through inner steps of plain tensors.
    """
    model, optimizer = prepared(job, mlp(), adam)

    def outer(part: Tensor) -> Tensor:
        fast: dict[str, Tensor] = dict(model.named_parameters())
        for _ in range(2):
            inner = torch.func.functional_call(model, fast, (part,)).square().mean()
            slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {name: one - 0.1 * slope for (name, one), slope in zip(fast.items(), slopes, strict=True)}
        return torch.func.functional_call(model, fast, (part,)).abs().mean()

    return trained_by(job, model, optimizer, outer, batches())


@report("pytorch/pytorch#130932")
def test_gradients_come_from_a_function_transform(job: Job) -> list[Tensor]:
    """Assigns what `torch.func.grad` returned.

    The script assigns gradients that torch.func computed; there is no backward.
    """
    model, optimizer = prepared(job, mlp())

    def loss(weights: dict[str, Tensor], batch: Tensor) -> Tensor:
        return job.loss(batch, square(lambda part: torch.func.functional_call(model, weights, (part,))))

    for batch in batches():
        optimizer.zero_grad()
        weights = {name: one.detach() for name, one in model.named_parameters()}
        for name, slope in torch.func.grad(loss)(weights, batch).items():
            model.get_parameter(name).grad = slope
        optimizer.step()
    return values(model)


# Steps that evaluate twice


class SharpnessAware(Optimizer):
    """Steps with the gradient at a point uphill; its `step` may be called without a closure in other uses."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([one.grad.norm() for one in parameters]).norm() + 1e-12
        for one in parameters:
            self.state[one]["up"] = 0.05 * one.grad / norm
            one.add_(self.state[one]["up"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(self.state[one]["up"])
        self.base.step()
        self.zero_grad()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None, "the closure evaluates again"
        with torch.enable_grad():
            closure()
        self.first_step()
        with torch.enable_grad():
            loss = closure()
        self.second_step()
        return loss


@report("davda54/sam#8, davda54/sam#66")
def test_a_sharpness_aware_step_evaluates_its_closure_twice(job: Job) -> list[Tensor]:
    """SAM with `step(closure=None)`."""
    model, optimizer = prepared(job, mlp(), SharpnessAware)
    for batch in batches():
        optimizer.step(job.closure(optimizer, batch, square(model)))
    return values(model)


@report("davda54/sam#38, davda54/sam#78")
@pytest.mark.parametrize("drops", [True, False], ids=["zero_grad", "model.zero_grad"])
def test_a_sharpness_aware_step_is_written_into_the_loop(job: Job, drops: bool) -> list[Tensor]:
    """SAM by hand, two backwards per step."""
    model, optimizer = prepared(job, mlp())
    for batch in batches():
        backward(job, model, optimizer, batch)
        here, uphill = values(model), [0.5 * one.grad for one in model.parameters() if one.grad is not None]
        whole = torch.stack([one.norm() for one in uphill]).norm()
        torch._foreach_add_([one.data for one in model.parameters()], [one / whole for one in uphill])
        (optimizer if drops else model).zero_grad()
        job.loss(batch, square(model)).backward()
        for one, value in zip(model.parameters(), here, strict=True):
            one.data.copy_(value)
        optimizer.step()
    return values(model)


@report("pytorch/pytorch#49993", tolerance=(1e-3, 1e-4))
def test_lbfgs_searches_along_a_line(job: Job) -> list[Tensor]:
    """LBFGS with a line search."""
    model = seeded(lambda: nn.Linear(4, 2))
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    optimizer = job.wrap(lbfgs, model)
    for batch in batches():
        optimizer.step(job.closure(optimizer, batch, lambda part: (model(part) - 1).square().mean()))
    return values(model)


# Gradients of unusual kinds


@report("pytorch/pytorch#101370, horovod/horovod#3529, pytorch/pytorch#22037", tolerance=(1e-5, 1e-6))
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "sparse_adam"])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_an_embedding_has_sparse_gradients(job: Job, kind: str) -> list[Tensor]:
    """`Embedding(sparse=True)` with SGD, Adagrad, SparseAdam."""
    model = seeded(lambda: nn.Embedding(10, 4, sparse=True))
    makes: dict[str, Callable[[], Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.5),
        "adagrad": lambda: torch.optim.Adagrad(model.parameters(), lr=0.5),
        "sparse_adam": lambda: torch.optim.SparseAdam(model.parameters(), lr=0.1),
    }
    optimizer = job.wrap(makes[kind](), model)
    rows = torch.tensor([[0, 1, 2, 2, 5, 2, 0, 7], [3, 3, 1, 0, 9, 9, 9, 1]] * 2)
    return trained_by(job, model, optimizer, lambda part: (model(part) - 1).square().mean(), rows)


@report("pytorch/pytorch#71613, pytorch/pytorch#99518")
@pytest.mark.parametrize("make", [momentum, adam])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_parameters_are_complex(
    job: Job, make: Callable[[nn.Module], Optimizer], dtype: torch.dtype
) -> list[Tensor]:
    """A complex and a real layer; the hub averages."""
    wave, head = seeded(lambda: nn.Linear(4, 3, dtype=dtype)), seeded(lambda: nn.Linear(3, 2))
    model, optimizer = prepared(job, nn.Sequential(wave, head), make)
    return trained(job, model, optimizer, lambda part: head(wave(part.to(dtype)).abs().float()))


@report("horovod/horovod#947")
def test_two_losses_are_given_to_one_backward(job: Job) -> list[Tensor]:
    """`torch.autograd.backward([a, b])`."""
    model, optimizer = prepared(job, mlp())
    for batch in batches():
        optimizer.zero_grad()
        other = job.loss(batch, lambda part: model(part).abs().mean())
        torch.autograd.backward([job.loss(batch, square(model)), other])
        optimizer.step()
    return values(model)


@report("Threads", error="two threads ran backward", refused=EVERYWHERE)
def test_two_threads_run_backward_at_once(job: Job) -> list[Tensor]:
    """Two threads run backward, and hide the error."""
    model, optimizer = prepared(job, mlp())
    for batch in batches():
        optimizer.zero_grad()
        other = job.loss(batch, lambda part: model(part).abs().mean())

        def hidden_backward(loss: Tensor = other) -> None:
            with suppress(Exception):
                loss.backward()

        thread, parts = Thread(target=hidden_backward), list(job.ranks)

        def meanwhile(_: Tensor, thread: Thread = thread, parts: list[int] = parts) -> None:
            parts.pop()
            if not parts:  # the last layer has its gradients
                thread.start()
                thread.join()

        def first(part: Tensor, meanwhile: Callable[[Tensor], None] = meanwhile) -> Tensor:
            hidden = model[:2](part)
            hidden.register_hook(meanwhile)
            return model[2](hidden).square().mean()

        job.loss(batch, first).backward()
        optimizer.step()
    return values(model)


@report("Alternating training")
def test_a_backward_fills_only_the_gradients_of_some_inputs(job: Job) -> list[Tensor]:
    """`backward(inputs=...)`."""
    model, optimizer = prepared(job, mlp())
    for batch in batches():
        optimizer.zero_grad()
        job.loss(batch, square(model)).backward(inputs=list(model[2].parameters()))
        optimizer.step()
    return values(model)


@report("Adversarial training")
def test_an_input_has_a_gradient_too(job: Job) -> list[Tensor]:
    """A backward for the input, one for the weights.

    As adversarial training does: a first backward for the input, a second for the weights.
    """
    model, optimizer = prepared(job, mlp())
    for batch in batches():
        optimizer.zero_grad()
        noisy = batch.clone().requires_grad_()
        job.loss(noisy, square(model)).backward()
        assert noisy.grad is not None
        moved = (batch + 0.1 * noisy.grad.sign()).detach()
        step(job, model, optimizer, moved)
    return values(model)

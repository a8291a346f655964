"""Scripts that use autograd in an unusual way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.reports.training import (
    Job,
    Topology,
    adam,
    assert_as_torch,
    batches,
    mlp,
    momentum,
    seeded,
    square,
    step,
    topologies,
    values,
)

# Activation checkpointing


@topologies()
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
def test_activations_are_checkpointed(topology: Topology, reentrant: bool) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model, timeout=5.0)

        def forward(part: Tensor) -> Any:
            return checkpoint(model, part.requires_grad_(), use_reentrant=reentrant)

        for batch in batches():
            step(job, forward, optimizer, batch.clone())
        return values(model)

    assert_as_torch(topology, script, refusal="use_reentrant")


@topologies()
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
def test_one_layer_is_checkpointed_twice(topology: Topology, reentrant: bool) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        optimizer = job.wrap(momentum(model), model, timeout=5.0)

        def forward(part: Tensor) -> Any:
            once = checkpoint(model, part.requires_grad_(), use_reentrant=reentrant)
            return checkpoint(model, once, use_reentrant=reentrant)

        for batch in batches():
            step(job, forward, optimizer, batch.clone())
        return values(model)

    assert_as_torch(topology, script, refusal="use_reentrant")


@topologies()
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
def test_segments_of_a_sequence_are_checkpointed(topology: Topology, reentrant: bool) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]))
        optimizer = job.wrap(momentum(model), model, timeout=5.0)

        def forward(part: Tensor) -> Any:
            return checkpoint_sequential(model, 2, part.requires_grad_(), use_reentrant=reentrant)

        for batch in batches():
            step(job, forward, optimizer, batch.clone())
        return values(model)

    assert_as_torch(topology, script, refusal="use_reentrant")


# Gradients of gradients


@topologies()
def test_a_critics_gradient_with_respect_to_its_input_is_penalised(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        critic = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 1)))
        optimizer = job.wrap(adam(critic), critic)

        def penalised(part: Tensor) -> Tensor:
            part = part.detach().requires_grad_()
            score = critic(part)
            (slope,) = torch.autograd.grad(score.sum(), part, create_graph=True)
            return score.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()

        for batch in batches():
            optimizer.zero_grad()
            job.loss(batch, penalised).backward()
            optimizer.step()
        return values(critic)

    assert_as_torch(topology, script)


@topologies()
def test_only_the_penalty_is_the_loss_and_the_last_bias_has_no_gradient(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        critic = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 1)))
        optimizer = job.wrap(momentum(critic), critic)

        def penalty(part: Tensor) -> Tensor:
            part = part.detach().requires_grad_()
            (slope,) = torch.autograd.grad(critic(part).sum(), part, create_graph=True)
            return slope.square().mean()

        for batch in batches():
            optimizer.zero_grad()
            job.loss(batch, penalty).backward()
            optimizer.step()
        return values(critic)

    assert_as_torch(topology, script)


@topologies()
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_backward_goes_through_the_gradients_in_grad(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model, backward_passes_per_step=2)
        for batch in batches():
            optimizer.zero_grad()
            job.loss(batch, square(model)).backward(create_graph=True)
            torch.stack(
                [one.grad.square().sum() for one in model.parameters() if one.grad is not None]
            ).sum().backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script, refusal="create_graph")


@topologies()
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_graph_of_the_gradients_is_made_and_not_used(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            optimizer.zero_grad()
            job.loss(batch, square(model)).backward(create_graph=True)
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script, refusal="create_graph")


@topologies()
def test_inner_steps_on_copies_of_the_weights(topology: Topology) -> None:
    """As meta-learning does: the outer gradient goes through inner steps of plain tensors."""

    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(adam(model), model)

        def outer(part: Tensor) -> Tensor:
            fast: dict[str, Tensor] = dict(model.named_parameters())
            for _ in range(2):
                inner = torch.func.functional_call(model, fast, (part,)).square().mean()
                slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
                fast = {
                    name: one - 0.1 * slope for (name, one), slope in zip(fast.items(), slopes, strict=True)
                }
            return torch.func.functional_call(model, fast, (part,)).abs().mean()

        for batch in batches():
            optimizer.zero_grad()
            job.loss(batch, outer).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_gradients_come_from_a_function_transform(topology: Topology) -> None:
    """The script assigns gradients that torch.func computed; there is no backward."""

    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)

        def loss(weights: dict[str, Tensor], batch: Tensor) -> Tensor:
            return job.loss(
                batch, lambda part: torch.func.functional_call(model, weights, (part,)).square().mean()
            )

        for batch in batches():
            optimizer.zero_grad()
            weights = {name: one.detach() for name, one in model.named_parameters()}
            for name, slope in torch.func.grad(loss)(weights, batch).items():
                model.get_parameter(name).grad = slope
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


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


@topologies()
def test_a_sharpness_aware_step_evaluates_its_closure_twice(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(SharpnessAware(model), model)
        for batch in batches():

            def closure(batch: Tensor = batch) -> Any:
                optimizer.zero_grad()
                loss = job.loss(batch, square(model))
                loss.backward()
                return loss

            optimizer.step(closure)
        return values(model)

    assert_as_torch(topology, script, refusal="--aggregate")


@topologies()
def test_a_sharpness_aware_step_is_written_into_the_loop(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            optimizer.zero_grad()
            job.loss(batch, square(model)).backward()
            uphill = [0.1 * one.grad for one in model.parameters() if one.grad is not None]
            torch._foreach_add_([one.data for one in model.parameters()], uphill)
            optimizer.zero_grad()
            job.loss(batch, square(model)).backward()
            torch._foreach_sub_([one.data for one in model.parameters()], uphill)
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script, refusal="aggregate")


@topologies()
def test_lbfgs_searches_along_a_line(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(lambda: nn.Linear(4, 2))
        lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
        optimizer = job.wrap(lbfgs, model)
        for batch in batches():

            def closure(batch: Tensor = batch) -> Any:
                optimizer.zero_grad()
                loss = job.loss(batch, lambda part: (model(part) - 1).square().mean())
                loss.backward()
                return loss

            optimizer.step(closure)
        return values(model)

    assert_as_torch(topology, script, refusal="LBFGS", rtol=1e-3, atol=1e-4)


# Gradients of unusual kinds


@topologies()
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "sparse adam"])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_an_embedding_has_sparse_gradients(topology: Topology, kind: str) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(lambda: nn.Embedding(10, 4, sparse=True))
        makes: dict[str, Callable[[], Optimizer]] = {
            "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.5),
            "adagrad": lambda: torch.optim.Adagrad(model.parameters(), lr=0.5),
            "sparse adam": lambda: torch.optim.SparseAdam(model.parameters(), lr=0.1),
        }
        optimizer = job.wrap(makes[kind](), model)
        rows = torch.tensor([[0, 1, 2, 2, 5, 2, 0, 7], [3, 3, 1, 0, 9, 9, 9, 1]] * 2)
        for chosen in rows:
            optimizer.zero_grad()
            job.loss(chosen, lambda part: (model(part) - 1).square().mean()).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script, refusal="[Ss]parse")


@topologies()
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_parameters_are_complex(topology: Topology, kind: str) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(lambda: nn.Linear(4, 2, dtype=torch.complex64))
        optimizer = job.wrap(momentum(model) if kind == "sgd" else adam(model), model)
        for batch in batches():
            step(job, lambda part: model(part.to(torch.complex64)).abs(), optimizer, batch)
        return values(model)

    assert_as_torch(topology, script, refusal="complex")


@topologies()
def test_two_losses_are_given_to_one_backward(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            optimizer.zero_grad()
            first, second = (
                job.loss(batch, square(model)),
                job.loss(batch, lambda part: model(part).abs().mean()),
            )
            torch.autograd.backward([first, second])
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_a_backward_fills_only_the_gradients_of_some_inputs(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            optimizer.zero_grad()
            job.loss(batch, square(model)).backward(inputs=list(model[2].parameters()))
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_an_input_has_a_gradient_too(topology: Topology) -> None:
    """As adversarial training does: a first backward for the input, a second for the weights."""

    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            optimizer.zero_grad()
            noisy = batch.clone().requires_grad_()
            job.loss(noisy, square(model)).backward()
            assert noisy.grad is not None
            moved = (batch + 0.1 * noisy.grad.sign()).detach()
            optimizer.zero_grad()
            job.loss(moved, square(model)).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)

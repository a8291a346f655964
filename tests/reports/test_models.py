"""Models of unusual kinds, and models that scripts convert, copy or save."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

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

_tracing = threading.Lock()
"""torch traces on one thread at a time."""


def recurrent(kind: Callable[..., nn.RNNBase]) -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = kind(2, 3, 2, batch_first=True)

        def forward(self, batch: Tensor) -> Tensor:
            self.cells.flatten_parameters()
            result: Tensor = self.cells(batch.view(-1, 2, 2))[0][:, -1]
            return result

    return Last()


@topologies()
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_network_flattens_its_parameters(topology: Topology, kind: type[nn.RNNBase]) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(lambda: recurrent(kind))
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


class WeightDrop(nn.Module):
    """Uses a masked copy of a weight in each forward, as regularised language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        raw = self.layer.weight
        del self.layer._parameters["weight"]
        self.layer.register_parameter("weight_raw", nn.Parameter(raw.data))

    def forward(self, batch: Tensor) -> Tensor:
        raw = self.layer.get_parameter("weight_raw")
        self.layer.weight = raw * (torch.arange(16).view(4, 4) % 3 > 0)
        return self.layer(batch)


@topologies()
def test_a_weight_is_dropped_in_each_forward(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(WeightDrop)
        optimizer = job.wrap(adam(model), model)
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_weights_are_parametrised(topology: Topology, norm: Any) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        seeded(lambda: norm(model[0]))
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_a_discriminator_with_spectral_norm_runs_twice_before_backward(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(lambda: parametrizations.spectral_norm(nn.Linear(4, 4)))
        optimizer = job.wrap(adam(model), model)
        fixed = batches(steps=1)[0, :4]
        for batch in batches():
            optimizer.zero_grad()
            # The power iteration sees weights only, and makes one step in each forward.
            real, fake = model(fixed).mean(), job.loss(batch, lambda part: model.eval()(part).square().mean())
            model.train()
            (real - fake).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_a_weight_is_parametrised_after_the_optimizer_was_made(topology: Topology) -> None:
    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).T

    def script(job: Job) -> list[Tensor]:
        model = seeded(lambda: nn.Linear(4, 4))
        optimizer = job.wrap(momentum(model), model)
        for turn, batch in enumerate(batches()):
            if turn == 1:
                parametrize.register_parametrization(model, "weight", Symmetric())
            if turn == 3:
                parametrize.remove_parametrizations(model, "weight")
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_weights_are_pruned_and_the_pruning_is_made_permanent(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for turn, batch in enumerate(batches()):
            if turn == 1:
                prune.l1_unstructured(model[0], "weight", 0.5)
            if turn == 3:
                prune.remove(model[0], "weight")
            step(job, model, optimizer, batch)
        return [one.detach().clone() for _, one in sorted(model.named_parameters())]

    assert_as_torch(topology, script)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 1), nn.Tanh(), nn.Conv2d(3, 2, 2))


@topologies()
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_convolutions_are_in_channels_last(topology: Topology, late: bool) -> None:
    """The model is converted before or after the optimizer is wrapped."""

    def script(job: Job) -> list[Tensor]:
        model: Any = seeded(convolutions)
        if not late:
            model = model.to(memory_format=torch.channels_last)
        optimizer = job.wrap(momentum(model), model)
        if late:
            model = model.to(memory_format=torch.channels_last)
        for batch in batches(width=8):
            step(job, lambda part: model(part.view(-1, 2, 2, 2)), optimizer, batch)
        assert model[2].weight.is_contiguous(memory_format=torch.channels_last)
        return values(model)

    assert_as_torch(topology, script, refusal="before you make DistributedOptimizer")


@topologies()
@pytest.mark.parametrize("after", [0, 1], ids=["at once", "after a step"])
@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_model_is_converted_after_the_optimizer_was_made(topology: Topology, kind: Any, after: int) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for turn, batch in enumerate(batches()):
            if turn == after:
                model.to(kind)
            step(job, model, optimizer, batch.to(kind) if turn >= after else batch)
        return values(model)

    assert_as_torch(topology, script, refusal="before you make DistributedOptimizer")


@topologies()
def test_a_parameter_is_not_contiguous(topology: Topology) -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 4).T)

        def forward(self, batch: Tensor) -> Tensor:
            return batch @ self.weight

    def script(job: Job) -> list[Tensor]:
        model = seeded(Transposed)
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_a_lazy_layer_is_filled_before_the_optimizer_is_made(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model: nn.Module = seeded(lambda: nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.LazyLinear(2)))
        seeded(lambda: model(torch.zeros(1, 4)))
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_a_lazy_layer_is_filled_in_the_first_forward(topology: Topology) -> None:
    """A refusal says to run a forward first."""

    def script(job: Job) -> list[Tensor]:
        model: nn.Module = nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.LazyLinear(2))
        optimizer = job.wrap(momentum(model), model)
        seeded(lambda: model(torch.zeros(1, 4)))
        for batch in batches():
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script, refusal="forward")


@topologies()
def test_parameters_have_different_types(topology: Topology) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 2).double()

        def forward(self, batch: Tensor) -> Tensor:
            return self.high(torch.tanh(self.low(batch.bfloat16())).double())

    def script(job: Job) -> list[Tensor]:
        model = seeded(Mixed)
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            step(job, model, optimizer, batch)
        return [one.float() for one in values(model)]

    assert_as_torch(topology, script, rtol=0.02, atol=0.02)


@topologies()
def test_a_copy_of_the_model_follows_as_its_moving_average(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(adam(model), model)
        average = copy.deepcopy(model).requires_grad_(False)
        for batch in batches():
            step(job, model, optimizer, batch)
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter.detach(), 0.5)
        return values(model, average)

    assert_as_torch(topology, script)


@topologies()
def test_a_copy_of_the_model_is_trained_locally(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for batch in batches():
            step(job, model, optimizer, batch)
        twin = copy.deepcopy(model)
        own = momentum(twin)
        step(Job(None), twin, own, batches()[0])
        return values(model, twin)

    assert_as_torch(topology, script)


@topologies()
def test_a_target_network_takes_over_the_weights_every_two_steps(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model, target = mlp(), mlp()
        optimizer = job.wrap(adam(model), model)
        for turn, batch in enumerate(batches()):
            optimizer.zero_grad()
            job.loss(batch, lambda part: (model(part) - target(part).detach() - 1).square().mean()).backward()
            optimizer.step()
            if turn % 2:
                target.load_state_dict(model.state_dict())
        return values(model, target)

    assert_as_torch(topology, script)


@topologies()
def test_a_transformer_is_evaluated_in_the_middle(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        layer = seeded(lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True))
        optimizer = job.wrap(momentum(layer, lr=0.01), layer)
        scores = []
        for batch in batches():
            layer.train()
            step(job, lambda part: layer(part[None]) - 1, optimizer, batch)
            layer.eval()
            with torch.inference_mode():
                scores.append(square(layer)(batch[None]).item())
        return [*values(layer), torch.tensor(scores)]

    assert_as_torch(topology, script, rtol=1e-4, atol=1e-5)


@topologies()
def test_an_ensemble_is_trained_through_vmap(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        base, other = mlp(), mlp()
        other.get_parameter("0.bias").data.add_(1.0)
        stacked, _ = torch.func.stack_module_state([base, other])
        weights = nn.ParameterDict({name.replace(".", "_"): one.detach() for name, one in stacked.items()})
        optimizer = job.wrap(momentum(weights), weights)

        def one_model(own: dict[str, Tensor], part: Tensor) -> Any:
            return torch.func.functional_call(base, own, (part,))

        def forward(part: Tensor) -> Tensor:
            own = {name: weights[name.replace(".", "_")] for name in stacked}
            return torch.vmap(one_model, (0, None))(own, part)

        for batch in batches():
            step(job, forward, optimizer, batch)
        return values(weights)

    assert_as_torch(topology, script)


@topologies()
def test_a_bag_of_embeddings_with_a_padding_row(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = seeded(lambda: nn.EmbeddingBag(8, 4, padding_idx=0))
        optimizer = job.wrap(adam(model), model)
        rows = torch.tensor([[[0, 1], [2, 3], [0, 0], [7, 1], [5, 0], [5, 5], [6, 1], [1, 0]]]).expand(
            4, -1, -1
        )
        for chosen in rows:
            optimizer.zero_grad()
            job.loss(chosen, lambda part: model(part).square().mean()).backward()
            optimizer.step()
        return values(model)

    assert_as_torch(topology, script)


@topologies()
def test_a_model_is_shared_with_other_processes(topology: Topology) -> None:
    def script(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = job.wrap(momentum(model), model)
        for turn, batch in enumerate(batches()):
            if turn == 2:
                model.share_memory()
            step(job, model, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script, refusal=r"call model\.share_memory\(\) before")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@topologies()
@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_a_model_is_traced(topology: Topology, early: bool) -> None:
    def script(job: Job) -> list[Tensor]:
        model: Any = mlp()
        traced = traced_model(model) if early else None
        optimizer = job.wrap(momentum(model), model if traced is None else traced)
        traced = traced or traced_model(model)
        for batch in batches():
            step(job, traced, optimizer, batch)
        return values(model)

    assert_as_torch(topology, script)


def traced_model(model: nn.Module) -> Any:
    with _tracing:
        return torch.jit.trace(model, batches()[0])

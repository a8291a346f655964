"""Unusual models, and models that are converted, copied or saved."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import Optimizer

from tests.reports.report import EVERYWHERE, report
from tests.reports.training import (
    Job,
    adam,
    batches,
    mlp,
    momentum,
    prepared,
    seeded,
    square,
    step,
    take,
    trained,
    trained_by,
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


@report("pytorch/pytorch#24155, pytorch/examples#248")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_network_flattens_its_parameters(job: Job, kind: type[nn.RNNBase]) -> list[Tensor]:
    """LSTM and GRU call `flatten_parameters` in forward."""
    return trained(job, *prepared(job, seeded(lambda: recurrent(kind))))


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


@report("pytorch/pytorch#40193, salesforce/awd-lstm-lm#120")
def test_a_weight_is_dropped_in_each_forward(job: Job) -> list[Tensor]:
    """WeightDrop."""
    return trained(job, *prepared(job, seeded(WeightDrop), adam))


@report("pytorch/pytorch#86457, descriptinc/descript-audio-codec#81")
@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_weights_are_parametrised(job: Job, norm: Any) -> list[Tensor]:
    """Weight norm and orthogonal weights."""
    model = mlp()
    seeded(lambda: norm(model[0]))
    return trained(job, model, job.wrap(momentum(model), model))


@report("pytorch/pytorch#8160, pytorch/pytorch#13350")
def test_a_discriminator_with_spectral_norm_runs_twice_before_backward(job: Job) -> list[Tensor]:
    """Spectral norm, two forwards."""
    model, optimizer = prepared(job, seeded(lambda: parametrizations.spectral_norm(nn.Linear(4, 4))), adam)
    fixed = batches(steps=1)[0, :4]
    for batch in batches():
        # The power iteration sees weights only, and makes one step in each forward.
        real, fake = model(fixed).mean(), job.loss(batch, lambda part: model.eval()(part).square().mean())
        model.train()
        take(optimizer, real - fake)
    return values(model)


@report("descriptinc/descript-audio-codec#81")
def test_a_weight_is_parametrised_after_the_optimizer_was_made(job: Job) -> list[Tensor]:
    """Adds and removes a parametrisation."""

    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).T

    model, optimizer = prepared(job, seeded(lambda: nn.Linear(4, 4)))
    trained(job, model, optimizer, stop=1)
    parametrize.register_parametrization(model, "weight", Symmetric())
    trained(job, model, optimizer, stop=2)
    parametrize.remove_parametrizations(model, "weight")
    return trained(job, model, optimizer, stop=1)


@report("pytorch/pytorch#24076, microsoft/nni#5205")
def test_weights_are_pruned_and_the_pruning_is_made_permanent(job: Job) -> list[Tensor]:
    """`prune`, later `prune.remove`."""
    model, optimizer = prepared(job, mlp())
    trained(job, model, optimizer, stop=1)
    prune.l1_unstructured(model[0], "weight", 0.5)
    trained(job, model, optimizer, stop=2)
    prune.remove(model[0], "weight")
    trained(job, model, optimizer, stop=1)
    return [one.detach().clone() for _, one in sorted(model.named_parameters())]


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 1), nn.Tanh(), nn.Conv2d(3, 2, 2))


@report("pytorch/pytorch#47163, pytorch/pytorch#70222", "the layout stays; afterwards an error is allowed")
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_convolutions_are_in_channels_last(job: Job, late: bool) -> list[Tensor]:
    """`channels_last` before and after wrapping.""" ""
    model: Any = seeded(convolutions)
    if not late:
        model = model.to(memory_format=torch.channels_last)
    model, optimizer = prepared(job, model)
    if late:
        model = model.to(memory_format=torch.channels_last)
    for batch in batches(width=8):
        step(job, lambda part: model(part.view(-1, 2, 2, 2)), optimizer, batch)
    assert model[2].weight.is_contiguous(memory_format=torch.channels_last)
    return values(model)


@report("freud14/poutyne#37", error="before you make DistributedOptimizer", refused=EVERYWHERE)
@pytest.mark.parametrize("after", [0, 1], ids=["at once", "after a step"])
@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_model_is_converted_after_the_optimizer_was_made(job: Job, kind: Any, after: int) -> list[Tensor]:
    """`.double()`, `.half()` or `.bfloat16()` after wrapping."""
    model, optimizer = prepared(job, mlp(), lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    trained(job, model, optimizer, stop=after)
    model.to(kind)
    return trained_by(job, model, optimizer, square(model), batches().to(kind))


@report("NVlabs/stylegan2-ada-pytorch#275")
def test_a_parameter_is_not_contiguous(job: Job) -> list[Tensor]:
    """A transposed parameter."""

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 4).T)

        def forward(self, batch: Tensor) -> Tensor:
            return batch @ self.weight

    return trained(job, *prepared(job, seeded(Transposed)))


@report("pytorch/pytorch#53366")
def test_a_lazy_layer_is_filled_before_the_optimizer_is_made(job: Job) -> list[Tensor]:
    """Lazy layers after a first forward."""
    model: nn.Module = seeded(lambda: nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.LazyLinear(2)))
    seeded(lambda: model(torch.zeros(1, 4)))
    return trained(job, model, job.wrap(momentum(model), model))


@report("meta-pytorch/torchrec#740", error="forward", refused=EVERYWHERE)
def test_a_lazy_layer_is_filled_in_the_first_forward(job: Job) -> list[Tensor]:
    """Lazy layers that are still empty.

    A refusal says to run a forward first.
    """
    model: nn.Module = nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.LazyLinear(2))
    optimizer = job.wrap(momentum(model), model)
    seeded(lambda: model(torch.zeros(1, 4)))
    return trained(job, model, optimizer)


@report("Mixed types", tolerance=(0.02, 0.02))
def test_parameters_have_different_types(job: Job) -> list[Tensor]:
    """Bfloat16 and float64 in one model."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 2).double()

        def forward(self, batch: Tensor) -> Tensor:
            return self.high(torch.tanh(self.low(batch.bfloat16())).double())

    model, optimizer = prepared(job, seeded(Mixed))
    trained(job, model, optimizer)
    return [one.float() for one in values(model)]


@report("pytorch/tutorials, DQN")
def test_a_target_network_takes_over_the_weights_every_two_steps(job: Job) -> list[Tensor]:
    """A target network is loaded."""
    (model, optimizer), target = prepared(job, mlp(), adam), mlp()
    for turn, batch in enumerate(batches()):
        job.step(optimizer, batch, lambda part: (model(part) - target(part).detach() - 1).square().mean())
        if turn % 2:
            target.load_state_dict(model.state_dict())
    return values(model, target)


@report("Lightning-AI/pytorch-lightning#9431", tolerance=(1e-4, 1e-5))
def test_a_transformer_is_evaluated_in_the_middle(job: Job) -> list[Tensor]:
    """Wraps and evaluates in `inference_mode`."""
    layer = seeded(lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True))
    with torch.inference_mode():
        optimizer = job.wrap(momentum(layer, lr=0.01), layer)
    scores = []
    for batch in batches():
        layer.train()
        step(job, lambda part: layer(part[None]) - 1, optimizer, batch)
        layer.eval()
        with torch.inference_mode():
            scores.append(square(layer)(batch[None]).item())
    return [*values(layer), torch.tensor(scores)]


@report("pytorch/pytorch#90477")
def test_an_ensemble_is_trained_through_vmap(job: Job) -> list[Tensor]:
    """`stack_module_state` and `vmap`."""
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

    return trained(job, weights, optimizer, forward)


@report("pytorch/pytorch#7947")
def test_a_bag_of_embeddings_with_a_padding_row(job: Job) -> list[Tensor]:
    """`EmbeddingBag(padding_idx=0)`."""
    model, optimizer = prepared(job, seeded(lambda: nn.EmbeddingBag(8, 4, padding_idx=0)), adam)
    rows = torch.tensor([[[0, 1], [2, 3], [0, 0], [7, 1], [5, 0], [5, 5], [6, 1], [1, 0]]]).expand(4, -1, -1)
    return trained_by(job, model, optimizer, square(model), rows)


@report("Evaluation processes", error=r"call model\.share_memory\(\) before", refused="hub")
def test_a_model_is_shared_with_other_processes(job: Job) -> list[Tensor]:
    """`model.share_memory()` after wrapping."""
    model, optimizer = prepared(job, mlp())
    trained(job, model, optimizer, stop=2)
    model.share_memory()
    return trained(job, model, optimizer, start=2)


@report("TorchScript")
@pytest.mark.filterwarnings("ignore:[^a-z]*torch.jit")  # since torch 2.14 with another category
@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_a_model_is_traced(job: Job, early: bool) -> list[Tensor]:
    """`torch.jit.trace`."""
    model: Any = mlp()
    traced = traced_model(model) if early else None
    optimizer = job.wrap(momentum(model), model if traced is None else traced)
    traced = traced or traced_model(model)
    return trained(job, model, optimizer, traced)


def traced_model(model: nn.Module) -> Any:
    with _tracing:
        return torch.jit.trace(model, batches()[0])


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def other_floats(request: pytest.FixtureRequest) -> Iterator[None]:
    """A default of all threads, which the ranks are."""
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


@report("pytorch")
@pytest.mark.usefixtures("other_floats")
@pytest.mark.parametrize("make", [momentum, adam])
@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
def test_a_default_device_and_a_default_dtype_are_for_the_scripts_tensors(
    job: Job, make: Callable[[nn.Module], Optimizer], early: bool
) -> list[Tensor]:
    """`set_default_device("meta")` and `set_default_dtype`."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 5, dtype=torch.float32), nn.BatchNorm1d(5).float()))
    data = torch.randn(4, 8, 4, dtype=torch.float32, generator=torch.Generator().manual_seed(1))
    optimizer = None if early else job.wrap(make(model), model)
    if optimizer is not None:
        step(job, model.eval(), optimizer, data[0])
    with torch.device("meta"):
        optimizer = optimizer or job.wrap(make(model), model)
        for batch in data:
            step(job, model.eval(), optimizer, batch)
        optimizer.load_state_dict(optimizer.state_dict())
        step(job, model, optimizer, data[0])
        mean = job.mean_over_ranks(data[0])
    assert torch.equal(mean, data[0])
    return values(model)


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group of torch, which DistributedDataParallel needs."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@report("DDP", refused="hub aggregate ring", error="in a DistributedDataParallel, which")
@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("given", ["wrapped", "inner", "nothing", "later", "later, nothing"])
def test_a_model_averages_its_gradients_itself(job: Job, given: str) -> list[Tensor]:
    """Passes a DistributedDataParallel, its module or its optimizer, or wraps afterwards."""
    model = mlp()
    passed = None if given.endswith("nothing") else model
    if given.startswith("later"):
        optimizer = job.wrap(momentum(model), passed)
    with _tracing:
        parallel = nn.parallel.DistributedDataParallel(model)
    if not given.startswith("later"):
        optimizer = job.wrap(momentum(model), parallel if given == "wrapped" else passed)
    return trained(job, model, optimizer, parallel)


@report("FSDP2", refused=EVERYWHERE, error="fully_shard")
@pytest.mark.usefixtures("group_of_one")
def test_a_model_shards_its_parameters_itself(job: Job) -> list[Tensor]:
    """Parameters of `fully_shard`."""
    model = mlp()
    with _tracing:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return trained(job, model, job.wrap(momentum(model), model))

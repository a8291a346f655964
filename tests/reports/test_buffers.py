"""Unusual buffers, and buffers that differ between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.reports.report import EVERYWHERE, report
from tests.reports.training import (
    Job,
    batches,
    mlp,
    momentum,
    prepared,
    seeded,
    square,
    step,
    take,
    trained,
    values,
)

SEVERAL = "hub aggregate ring"


class Buffered(nn.Module):
    """A linear layer behind a batch normalisation, with a further buffer."""

    def __init__(self, buffer: Tensor | None, persistent: bool = True) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("more", buffer, persistent)

    def forward(self, batch: Tensor) -> Tensor:
        return self.layer(self.norm(batch))


def phases() -> Tensor:
    return torch.polar(torch.ones(3), torch.arange(3.0))


KINDS: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: torch.tensor([[2.0]]).expand(3, 4),
    "complex": phases,
    "conjugated": lambda: phases().conj(),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "transposed": lambda: torch.arange(6.0).view(2, 3).T,
    "flags": lambda: torch.tensor([True, False]),
    "half": lambda: torch.ones(3, dtype=torch.float16),
    "empty": lambda: torch.empty(0, 4),
    "scalar": lambda: torch.tensor(7, dtype=torch.int32),
}


@report("pytorch/pytorch#34880, pytorch/pytorch#68407, pytorch/pytorch#99652")
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_has_a_buffer_of_any_kind(job: Job, kind: str) -> list[Tensor]:
    """Expanded, complex, conjugated, sparse, transposed, bool, half, empty, scalar."""
    model = seeded(lambda: Buffered(KINDS[kind]()))
    # Where rank 0 cannot send its buffer, the other rank waits until the timeout.
    optimizer = job.wrap(momentum(model), model, timeout=3.0)
    trained(job, model, optimizer)
    more = model.get_buffer("more")
    return [*values(model), more.to_dense().resolve_conj().clone()]


@report("pytorch/pytorch#111138", "rank 0's")
def test_buffers_start_as_those_of_rank_0(job: Job) -> list[Tensor]:
    """Ranks start with other buffers."""
    rank = job.ranks[0]
    model = seeded(lambda: Buffered(torch.full((3,), float(rank))))
    model.norm.running_mean.fill_(rank)  # type: ignore[union-attr]
    job.wrap(momentum(model), model)
    return [one.clone() for one in model.buffers()]


@report("lucidrains/CoCa-pytorch#17", on=SEVERAL, refused=SEVERAL, error=r"more.*rank|rank.*more")
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("shape", [True, False], ids=["shape", "dtype"])
def test_buffers_that_differ_are_refused_by_name(job: Job, shape: bool, persistent: bool) -> list[Tensor]:
    """A mask has another length or dtype on each rank."""
    rank = job.ranks[0]
    length, dtype = (3 + rank, torch.float32) if shape else (3, [torch.float32, torch.float16][rank])
    model = seeded(lambda: Buffered(torch.ones(length, length, dtype=dtype).tril(), persistent))
    job.wrap(momentum(model), model)
    return []


@report("Frozen encoders", on=SEVERAL, refused=SEVERAL, error="frozen")
def test_frozen_parameters_that_differ_in_shape_are_refused_by_name(job: Job) -> list[Tensor]:
    """A frozen layer has another shape on each rank."""
    trained, frozen = nn.Linear(4, 2), nn.Linear(4, 2 + job.ranks[0]).requires_grad_(False)
    model = nn.ModuleDict({"trained": trained, "frozen": frozen})
    job.wrap(momentum(trained), model)
    return []


@report("pytorch/pytorch#63916")
def test_a_buffer_is_made_anew_in_every_forward(job: Job) -> list[Tensor]:
    """Assigns `self.seen = self.seen + 1`."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, batch: Tensor) -> Tensor:
            self.seen = self.get_buffer("seen") + 1
            return self.layer(batch) * self.seen

    model, optimizer = prepared(job, seeded(Counting))
    return trained(job, model, optimizer, lambda part: model(part) / model.get_buffer("seen"))


@report("pytorch/pytorch#22095")
def test_a_model_with_a_buffer_runs_twice_before_backward(job: Job) -> list[Tensor]:
    """Two forwards, one backward."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("scale", torch.full((1, 4), 0.5))

        def forward(self, batch: Tensor) -> Tensor:
            return self.layer(batch) * self.scale

    model, optimizer = prepared(job, seeded(Scaled))
    return trained(job, model, optimizer, lambda part: model(model(part)))


@report(
    "horovod/horovod#1077, horovod/horovod#1384, pytorch/pytorch#22192",
    error="SyncBatchNorm",
    refused="hub aggregate ring",
)
def test_sync_batch_norm_sees_the_batches_of_all_ranks(job: Job) -> list[Tensor]:
    """`convert_sync_batchnorm`."""
    model = seeded(
        lambda: nn.SyncBatchNorm.convert_sync_batchnorm(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
        )
    )
    optimizer = job.wrap(momentum(model), model)
    for batch in batches():
        take(optimizer, square(model)(torch.cat(job.parts(batch))))
    return [*values(model), *[one.clone() for one in model.buffers()]]


class Codebook(nn.Module):
    """Subtracts a running mean of its input, as codebooks and centring layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, batch: Tensor) -> Tensor:
        centre = self.get_buffer("centre")
        result = self.layer(batch - centre.clone())
        centre.lerp_(batch.detach().mean(0), 0.5)
        return result


@report(
    "ZhikangNiu/encodec-pytorch#15, sangmichaelxie/doremi#8",
    "as DDP, with rank 0's buffer",
    on=SEVERAL,
    fails="hub aggregate ring",
    reason="buffers are copied from rank 0 once, as documented; DDP does it before each forward",
)
def test_a_running_mean_is_that_of_rank_0_in_every_forward(job: Job) -> list[Tensor]:
    """The forward uses a buffer that it updates.

    As under DistributedDataParallel, which copies rank 0's buffers before each forward.
    """
    model, optimizer = prepared(job, seeded(Codebook))
    for batch in batches():
        centre = model.get_buffer("centre").clone()
        outputs = []
        for part in reversed(job.parts(batch)):
            model.get_buffer("centre").copy_(centre)
            outputs.append(square(model)(part))
        take(optimizer, torch.stack(outputs).mean())
    return values(model)


@report("mlcommons/algorithmic-efficiency#325")
def test_batch_norm_is_frozen_by_eval_and_its_statistics_stay(job: Job) -> list[Tensor]:
    """`BatchNorm.eval()` during training."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    model[1].eval()
    optimizer = job.wrap(momentum(model), model)
    trained(job, model, optimizer)
    return [*values(model), *[one.clone() for one in model.buffers()]]


@report("facebookresearch/fvcore#152")
def test_the_models_statistics_are_averaged_by_the_script(job: Job) -> list[Tensor]:
    """The script averages a statistic itself."""
    model = mlp()
    model.register_buffer("mean", torch.zeros(4))
    optimizer = job.wrap(momentum(model), model)
    for batch in batches():
        step(job, model, optimizer, batch)
        mean = job.mean_over_ranks(torch.cat(job.parts(batch)).mean(0))
        model.get_buffer("mean").lerp_(mean, 0.5)
    return [*values(model), model.get_buffer("mean").clone()]


class Packed(Tensor):
    """A weight that wraps another tensor, as layers that are quantized for adapters have."""

    @staticmethod
    def __new__(cls, inner: Tensor, *_: Any) -> Packed:
        made: Packed = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    def __init__(self, inner: Tensor, *_: Any) -> None:
        self.packed = inner

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any, kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].packed)
        raise TypeError(f"{function} is not supported")


ODD: dict[str, Callable[[], Tensor]] = {
    "meta": lambda: torch.zeros(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "mkldnn": lambda: torch.ones(3, 3).to_mkldnn(),
    "packed": lambda: Packed(torch.ones(3)),
    "lazy": nn.UninitializedBuffer,
}
TENSORS = pytest.mark.parametrize("make", ODD.values(), ids=ODD)


@report("peft")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested tensors")
@TENSORS
@pytest.mark.parametrize("frozen", [False, True], ids=["buffer", "frozen"])
def test_a_tensor_that_is_not_dense_stays_as_it_is(
    job: Job, make: Callable[[], Tensor], frozen: bool
) -> list[Tensor]:
    """Frozen tensors that are quantized, nested, meta or wrappers."""
    model, odd = mlp(), seeded(make)
    if frozen and type(odd) is not nn.UninitializedBuffer and not odd.is_quantized:
        model.register_parameter("odd", nn.Parameter(odd, requires_grad=False))
    else:
        model.register_buffer("odd", odd)
    optimizer = job.wrap(torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1), model)
    return trained(job, model[:3], optimizer)


@report(
    "pytorch",
    refused=EVERYWHERE,
    error="parameter odd is (on the meta device|a Packed|nested)",
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ["meta", "packed", "nested"])
def test_a_trained_parameter_that_is_not_dense_is_named(job: Job, name: str) -> list[Tensor]:
    """Trained parameters that are nested, meta or wrappers."""
    model = mlp()
    model.register_parameter("odd", nn.Parameter(ODD[name]()))
    return trained(job, model, job.wrap(momentum(model), model))


@report("pytorch", refused=EVERYWHERE, error="grad_dtype is torch.float32")
def test_gradients_of_another_dtype_are_refused(job: Job) -> list[Tensor]:
    """`parameter.grad_dtype = torch.float32` for bfloat16 parameters."""
    model = mlp().bfloat16()
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    return trained(job, model, job.wrap(momentum(model), model))

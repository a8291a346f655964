"""Compressed training ends where uncompressed training does, on every topology; and less travels."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hubring.ps.core.errors import ConfigError
from hubring.workers.communicators.base import Communicator
from hubring.workers.communicators.ring.communicator import AllreduceCommunicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.reports.training import take
from tests.support.training.ranks import LIMIT, AggregatingRanks, HubRanks, Ranks, RingRanks

T = TypeVar("T")
CODECS = ["bf16", "fp16", "int8", "sign", "topk:0.1", "powersgd:2"]
STEPS = 150
DECAY = 1e-2
"""Makes the problem strongly convex, so that there is one optimum to come to."""


class Run(NamedTuple):
    """What rank 0 ends with."""

    losses: list[float]
    parameters: list[Tensor]
    bytes_sent: int
    bytes_received: int


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Real data: 600 images of handwritten digits, 8 x 8, and what they show."""
    from sklearn.datasets import load_digits  # takes seconds, which no other test file should wait for

    whole = load_digits()
    return torch.from_numpy(whole.images[:600]).float().flatten(1) / 16, torch.from_numpy(whole.target[:600])


def regression() -> nn.Linear:
    model = nn.Linear(64, 10)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    decay = sum(parameter.square().sum() for parameter in model.parameters()) * DECAY / 2
    return functional.cross_entropy(model(images), labels) + decay


def train(communicator: Communicator, steps: int = STEPS) -> Run:
    """Softmax regression by gradient descent with momentum; every rank has a share of the images."""
    images, labels = digits()
    mine = slice(communicator.rank, None, communicator.size)
    model = regression()
    inner = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.8)
    optimizer = DistributedOptimizer(inner, model, communicator=communicator)
    losses = []
    for _ in range(steps):
        take(optimizer, loss_of(model, images[mine], labels[mine]))
        with torch.no_grad():
            losses.append(loss_of(model, images, labels).item())
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    traffic = communicator.traffic
    return Run(losses, parameters, traffic.bytes_sent, traffic.bytes_received)


KINDS: dict[str, type[Ranks]] = {"hub": HubRanks, "aggregate": AggregatingRanks, "ring": RingRanks}


def on(topology: str, compress: str, action: Callable[[Communicator], T], ranks: int = 2) -> list[T]:
    """Returns what the action gives on each of some compressing ranks."""
    settings = {"size": ranks, "compress": compress, "slice_bytes": 1024}
    compressed: type[Ranks] = type("Compressed", (KINDS[topology],), settings)
    return compressed.run_once(action)


def runs(topology: str, compress: str, ranks: int = 2, steps: int = STEPS) -> list[Run]:
    return on(topology, compress, lambda communicator: train(communicator, steps), ranks)


@cache
def plain(topology: str) -> Run:
    """Five steps without compression."""
    return runs(topology, "", steps=5)[0]


@cache
def optimum() -> float:
    """The least loss there is."""
    images, labels = digits()
    model = regression().double()
    solver = torch.optim.LBFGS(
        model.parameters(), max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        solver.zero_grad()
        loss = loss_of(model, images.double(), labels)
        loss.backward()
        return loss

    solver.step(closure)
    return closure().item()


CASES = [
    (topology, codec)
    for topology in KINDS
    for codec in CODECS
    if (topology, codec) != ("hub", "powersgd:2")  # refused in WorkerConfig
]

# How far from the optimum the loss may be in the last steps. Uncompressed it is 8e-5; each limit is about
# twice what was measured. Without error feedback sign and topk end 0.16 to 0.22 away.
LIMITS = {"bf16": 2e-4, "fp16": 2e-4, "int8": 2e-4, "sign": 3e-3, "topk:0.1": 1e-3, "powersgd:2": 2e-4}


FIRST = [("hub", "sign"), ("ring", "topk:0.1")]
"""Whose whole training `make test` runs; the other tests have a few steps of every case."""
OTHERS = [
    ("aggregate", "int8"),
    ("ring", "powersgd:2"),
    ("hub", "topk:0.1"),
    ("ring", "sign"),
    ("aggregate", "bf16"),
    ("ring", "fp16"),
    ("aggregate", "powersgd:2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "codec"), [*FIRST, *(pytest.param(*case, marks=pytest.mark.full) for case in OTHERS)]
)
def test_compressed_training_comes_to_the_optimum(topology: str, codec: str) -> None:
    run = runs(topology, codec)[0]
    assert run.losses[0] - optimum() > 0.5
    assert max(run.losses[-20:]) - optimum() < LIMITS[codec]


@pytest.mark.parametrize(("topology", "codec"), CASES)
def test_ranks_end_in_the_same_bytes_and_so_does_a_rerun(topology: str, codec: str) -> None:
    first, *others = runs(topology, codec, ranks=3, steps=4) + runs(topology, codec, ranks=3, steps=4)
    assert first.losses[-1] < first.losses[0]
    for other in others:
        assert all(map(torch.equal, first.parameters, other.parameters))


SHORTER = {"bf16": 2, "fp16": 2, "int8": 3.8, "sign": 20, "topk:0.1": 4.7, "powersgd:2": 4}


@pytest.mark.parametrize(("topology", "codec"), CASES)
def test_less_travels_both_ways_where_means_come_back(topology: str, codec: str) -> None:
    whole, run = plain(topology), runs(topology, codec, steps=5)[0]
    start = 650 * 4 if topology == "hub" else 0  # the hub's first parameters travel in full
    assert (whole.bytes_sent - start) / (run.bytes_sent - start) > SHORTER[codec] * 0.9
    received = (whole.bytes_received - start) / (run.bytes_received - start)
    assert received == pytest.approx(1) if topology == "hub" else received > SHORTER[codec] * 0.9


@pytest.mark.parametrize("topology", ["aggregate", "ring"])
@pytest.mark.parametrize("codec", CODECS)
def test_every_rank_learns_of_one_ranks_overflow_and_goes_on_afterwards(topology: str, codec: str) -> None:
    def action(communicator: Communicator) -> tuple[bool, bool]:
        model = regression()
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = DistributedOptimizer(sgd, model, communicator=communicator)
        first = one_mean(communicator, model, math.inf)
        optimizer.zero_grad()
        return first, one_mean(communicator, model, 1.0)

    assert on(topology, codec, action) == [(False, True)] * 2


def one_mean(communicator: Communicator, model: nn.Linear, weight: float) -> bool:
    """Whether the mean gradient is finite where rank 1 gives one of this weight."""
    images, labels = digits()
    loss = functional.cross_entropy(model(images), labels)
    (loss * (weight if communicator.rank == 1 else 1.0)).backward()
    gradient = model.weight.grad
    assert gradient is not None
    return bool(gradient.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("topology", "codec"), CASES)
def test_models_of_other_dtypes_are_compressed_too(topology: str, codec: str, dtype: torch.dtype) -> None:
    def action(communicator: Communicator) -> Tensor:
        model = nn.Linear(64, 10, bias=False).to(dtype)
        with torch.no_grad():
            model.weight.zero_()
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(sgd, model, communicator=communicator)
        (-model.weight.sum()).backward()
        optimizer.step()
        return model.weight.detach().clone()

    for weight in on(topology, codec, action):
        kept = weight[weight != 0]  # topk gives a tenth of them the gradient of one
        torch.testing.assert_close(kept, torch.ones_like(kept), rtol=1e-2, atol=1e-2)
        assert len(kept) >= 64


@pytest.mark.parametrize("other", ["bf16", "powersgd:2", ""])
def test_ring_members_must_compress_alike(other: str) -> None:
    class Mixed(RingRanks):
        size = 2

        def join(self, rank: int) -> Communicator:
            return AllreduceCommunicator(
                rank, 2, self.store, host="127.0.0.1", timeout=LIMIT, compress=["int8", other][rank]
            )

    def action(communicator: Communicator) -> str:
        with pytest.raises(ConfigError) as caught:
            train(communicator, 1)
        return str(caught.value)

    (text,) = set(Mixed().run(action))
    assert "rank 1" in text
    assert f"--compress {other or 'not given'}" in text
    assert "--compress int8" in text


@pytest.mark.parametrize("codec", ["", *CODECS])
def test_two_optimizers_share_a_ring(codec: str) -> None:
    def action(communicator: Communicator) -> list[float]:
        models = [nn.Linear(64, 10, bias=False) for _ in range(2)]
        optimizers = [
            DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=1.0), m, communicator=communicator)
            for m in models
        ]
        for weight, model, optimizer in zip((1, 2), models, optimizers, strict=True):
            (model.weight * weight).sum().backward()
            optimizer.step()
        return [float(m.weight.grad.abs().max()) for m in models if m.weight.grad is not None]

    for ends in on("ring", codec, action):
        assert ends == pytest.approx([1, 2], rel=1e-2)


@pytest.mark.parametrize("codec", ["bf16", "fp16"])
def test_seven_ranks_whose_shares_do_not_add_up_to_one_take_every_step(codec: str) -> None:
    """7 times the bf16 number next to 1/7 is not 1."""

    def action(communicator: Communicator) -> int:
        model = nn.Linear(4, 4)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model, communicator=communicator
        )
        for _ in range(4):
            take(optimizer, model(torch.ones(2, 4)).sum())
        return optimizer.completed_steps

    assert on("ring", codec, action, ranks=7) == [4] * 7


def test_a_codec_that_saves_nothing_around_the_ring_is_told(caplog: pytest.LogCaptureFixture) -> None:
    runs("ring", "topk:0.4", ranks=3, steps=1)
    (line,) = [record.getMessage() for record in caplog.records if "saves nothing" in record.getMessage()]
    assert "--compress topk:0.4 saves nothing on a ring of 3" in line

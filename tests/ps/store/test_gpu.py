"""What only a GPU can show: the bits of the CPU, copies beside training, and no thread held up by either."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hubring.ps.compression.gpu_tensor import CudaMemory
from hubring.ps.core.messages import Init, Push, Values
from hubring.ps.core.types import BucketSpec, Member, Sender, Slice, TensorSpec, View
from hubring.ps.optim.hyperparameters import hyper_of
from hubring.ps.store.consistency import BSP
from hubring.ps.store.parameter_memory import GpuMemory, find_gpu
from hubring.ps.store.store import KVStore
from hubring.ps.transport.shm.transport import ShmTransport
from hubring.ps.transport.zmq.transport import ZmqTransport
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.bucketing import make_buckets
from hubring.workers.buckets.staging import pinned
from hubring.workers.communicators.base import Communicator
from hubring.workers.optimizer.distributed import DistributedOptimizer
from tests.support.training.ranks import LIMIT, HubRanks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]

WIDTH = 512
LONG = 4_000_000_000
"""Cycles for which a stream is kept busy: about two seconds, far more than an exchange takes."""


class OneRank(HubRanks):
    """A hub of two shards on the CPU, with one worker."""

    size = 1
    slice_bytes = 256 << 10


class OneRankByNetwork(OneRank):
    wire = ZmqTransport


def layers(device: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.05, 0.05, generator=generator)
    return model.to(device)


def buckets_of(communicator: Communicator, device: str) -> list[Bucket]:
    model = layers(device)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    named = list(model.named_parameters())
    memory = communicator.allocate, communicator.allocate_values
    buckets = make_buckets(sgd, named, memory[0], 256 << 10, "SGD", memory[1])
    communicator.attach(buckets)
    return buckets


def exchanged(kind: type[HubRanks], device: str) -> list[Tensor]:
    """The values after three exchanges of gradients that are the same on every device."""

    def action(communicator: Communicator) -> list[Tensor]:
        buckets = buckets_of(communicator, device)
        hyper = hyper_of(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9).param_groups[0], "SGD")
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            for bucket in buckets:
                bucket.gradients.copy_(torch.randn(bucket.gradients.numel(), generator=generator))
            works = [communicator.push_pull(bucket, hyper) for bucket in buckets]
            for bucket, work in zip(buckets, works, strict=True):
                work.wait(LIMIT)
                bucket.arrive()
        return [bucket.values.to("cpu", copy=True) for bucket in buckets]

    with closing(kind()) as ranks:
        return ranks.run(action)[0]


# Staging.


@pytest.mark.parametrize("kind", [OneRank, OneRankByNetwork])
def test_exchanges_from_a_gpu_end_in_the_bits_of_those_from_the_cpu(kind: type[HubRanks]) -> None:
    for there, here in zip(exchanged(kind, "cuda"), exchanged(kind, "cpu"), strict=True):
        assert torch.equal(there, here)


@pytest.mark.parametrize("allocate", [ShmTransport().allocate, lambda nbytes: memoryview(bytearray(nbytes))])
def test_host_memory_is_pinned_wherever_it_comes_from(allocate: Any) -> None:
    memory = pinned(1000, torch.float32, lambda n, dtype: torch.frombuffer(allocate(4 * n), dtype=dtype))
    assert memory.is_pinned()
    assert not memory.any()


def test_an_exchange_ends_while_training_goes_on() -> None:
    def action(communicator: Communicator) -> bool:
        bucket, *_ = buckets_of(communicator, "cuda")
        hyper = hyper_of(torch.optim.SGD([torch.zeros(1)], lr=0.1).param_groups[0], "SGD")
        work = communicator.push_pull(bucket, hyper)
        torch.cuda._sleep(LONG)  # as the rest of backward
        busy = torch.cuda.current_stream().record_event()
        work.wait(LIMIT)
        assert bucket.stage is not None
        landed = bucket.stage._landed
        assert landed is not None
        landed.synchronize()
        return not busy.query()

    with closing(OneRank()) as ranks:
        assert ranks.run(action) == [True]


def test_handing_over_returns_while_backward_still_runs() -> None:
    def action(communicator: Communicator) -> bool:
        bucket, *_ = buckets_of(communicator, "cuda")
        hyper = hyper_of(torch.optim.SGD([torch.zeros(1)], lr=0.1).param_groups[0], "SGD")
        bucket.gradients.fill_(0)
        communicator.push_pull(bucket, hyper).wait(LIMIT)  # the first use of memory or a kernel may wait
        before = bucket.values.cpu()
        torch.cuda._sleep(LONG)
        busy = torch.cuda.current_stream().record_event()
        bucket.gradients.fill_(1)
        work = communicator.push_pull(bucket, hyper)
        returned_early = not busy.query()
        work.wait(LIMIT)
        bucket.arrive()
        torch.testing.assert_close(bucket.values.cpu(), before - 0.1)
        return returned_early

    with closing(OneRank()) as ranks:
        assert ranks.run(action) == [True]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("cross_barrier", [False, True])
def test_a_step_synchronises_nothing(cross_barrier: bool) -> None:
    def action(communicator: Communicator) -> None:
        model = layers("cuda")
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            communicator=communicator,
            bucket_bytes=256 << 10,
            cross_barrier=cross_barrier,
        )
        batch = torch.ones(8, WIDTH, device="cuda")
        for step in range(6):
            torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        optimizer.synchronize()

    with closing(OneRank()) as ranks:
        try:
            ranks.run(action)
        finally:
            torch.cuda.set_sync_debug_mode("default")


# A store on the GPU.


def store_on_gpu(optimizer: str, workers: int) -> tuple[KVStore, CudaMemory]:
    device = find_gpu("cuda")
    memory = CudaMemory(device)
    store = KVStore(BSP(), GpuMemory(device, memory))
    store.on_view(View(1, tuple(Member(rank, 1) for rank in range(workers))))
    spec = BucketSpec(0, "float32", optimizer, (TensorSpec("weight", (1000,)),))
    store.assign([Slice(0, 0, 0, 1000, 0)], [spec])
    store.handle(Init(Sender(0, 1), 0, torch.linspace(-1, 1, 1000)), "init")
    return store, memory


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("Adam", {"lr": 0.01, "amsgrad": True}),
        ("AdamW", {"lr": 0.01}),
    ],
)
def test_a_store_on_a_gpu_steps_as_torchs_fused_optimizer_there(name: str, options: dict[str, Any]) -> None:
    store, _ = store_on_gpu(name, workers=1)
    parameter = torch.linspace(-1, 1, 1000).cuda().requires_grad_()
    optimizer = getattr(torch.optim, name)([parameter], fused=True, **options)
    hyper = hyper_of(optimizer.param_groups[0], name)
    for clock in range(3):
        gradient = torch.randn(1000, generator=torch.Generator().manual_seed(clock))
        parameter.grad = gradient.cuda()
        optimizer.step()
        ((_, reply),) = store.handle(Push(Sender(0, 1), 0, clock, gradient, hyper), "push")
        assert isinstance(reply, Values)
        assert isinstance(reply.values, Tensor)
        assert torch.equal(reply.values, parameter.detach().cpu())


def test_a_store_on_a_gpu_takes_the_mean_in_rank_order() -> None:
    store, _ = store_on_gpu("", workers=3)
    gradients = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    deliveries = []
    for rank in (2, 0, 1):
        deliveries += store.handle(Push(Sender(rank, 1), 0, 0, gradients[rank], {}), rank)
    expected = (gradients[0].cuda() + gradients[1].cuda() + gradients[2].cuda()).div(3).cpu()
    for _, reply in deliveries:
        assert isinstance(reply, Values)
        assert isinstance(reply.values, Tensor)
        assert torch.equal(reply.values, expected)

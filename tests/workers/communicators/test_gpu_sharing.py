"""Which workers read the hub's store on their own GPU, and what the log says to the others."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from hubring.ps.compression import gpu_tensor
from hubring.ps.transport.registry import ShardAddress
from hubring.workers.buckets.bucket import Bucket
from hubring.workers.buckets.staging import DeviceWaiter, ThroughHost
from hubring.workers.communicators import gpu_sharing
from tests.support.fakes.gpu import GPU, FakeMemory
from tests.support.fakes.lazy_device import LazyDevice

NOBODY = cast(DeviceWaiter, None)  # nothing is carried in these tests
TOKEN = torch.arange(16, dtype=torch.uint8)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> FakeMemory:
    memory = FakeMemory()
    monkeypatch.setattr(gpu_sharing, "own_gpu", lambda _: (GPU, memory))
    return memory


def on_device() -> Bucket:
    gradients, values = torch.zeros(4), torch.zeros(4)
    stage = ThroughHost(
        gradients, values, LazyDevice(), NOBODY, lambda numel, dtype: torch.zeros(numel, dtype=dtype)
    )
    return cast(Bucket, SimpleNamespace(gradients=gradients, values=values, stage=stage))


def on_cpu() -> Bucket:
    values = torch.zeros(4)
    return cast(Bucket, SimpleNamespace(values=values, stage=None))


def shard(memory: FakeMemory, gpu: str = GPU) -> ShardAddress:
    return ShardAddress(
        "here", {"shm": "shm://1", gpu_tensor.ADDRESS: gpu_tensor.invitation(gpu, memory, TOKEN)}
    )


def test_all_on_one_gpu_share_its_memory(memory: FakeMemory, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert gpu_sharing.shared_memory([shard(memory)] * 2, [on_device(), on_device()], "bsp") is memory
    assert "exchange stays on the GPU" in caplog.text


def test_a_hub_on_the_cpu_is_worth_no_line(memory: FakeMemory, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert gpu_sharing.shared_memory([ShardAddress("here", {"shm": "shm://1"})], [on_device()], "bsp") is None
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("asynchronous", "in mode asp values can change while they are read"),
        ("a shard on a CPU", "only 1 of 2 shards are on a GPU"),
        ("model on the CPU", "the model is on cpu"),
        ("other GPU", "the server's parameters are on GPU-other, but this worker's are on GPU-fake"),
        ("cut off", "cannot reach another process's memory"),
    ],
)
def test_the_others_go_through_host_memory_and_are_told_why(
    memory: FakeMemory, caplog: pytest.LogCaptureFixture, case: str, why: str
) -> None:
    shards = [
        shard(FakeMemory() if case == "cut off" else memory, "GPU-other" if case == "other GPU" else GPU)
    ]
    if case == "a shard on a CPU":
        shards.append(ShardAddress("here", {"shm": "shm://1"}))
    bucket = on_cpu() if case == "model on the CPU" else on_device()
    caplog.set_level(logging.INFO)
    assert gpu_sharing.shared_memory(shards, [bucket], "asp" if case == "asynchronous" else "bsp") is None
    assert f"exchange uses host memory: {why}" in caplog.text

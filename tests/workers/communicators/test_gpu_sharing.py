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
    ("why", "mode", "shards", "bucket"),
    [
        ("in mode asp values can change while they are read", "asp", "here", on_device),
        ("only 1 of 2 shards are on a GPU", "bsp", "here and on a CPU", on_device),
        ("the model is on cpu", "bsp", "here", on_cpu),
        (
            "the server's parameters are on GPU-other, but this worker's are on GPU-fake",
            "bsp",
            "there",
            on_device,
        ),
        ("cannot reach another process's memory", "bsp", "cut off", on_device),
    ],
)
def test_the_others_go_through_host_memory_and_are_told_why(
    memory: FakeMemory, caplog: pytest.LogCaptureFixture, why: str, mode: str, shards: str, bucket: object
) -> None:
    lines = {
        "here": lambda: [shard(memory)],
        "here and on a CPU": lambda: [shard(memory), ShardAddress("here", {"shm": "shm://1"})],
        "there": lambda: [shard(memory, "GPU-other")],
        "cut off": lambda: [shard(FakeMemory())],
    }[shards]()
    caplog.set_level(logging.INFO)
    assert callable(bucket)
    assert gpu_sharing.shared_memory(lines, [bucket()], mode) is None
    assert f"exchange uses host memory: {why}" in caplog.text

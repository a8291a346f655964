"""What a process reports about its own CPU time and memory."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from hubring.ps.core.counters import gpu_use, usage


def test_memory_follows_what_the_process_holds_and_its_peak_stays() -> None:
    size = 64 << 20
    before = usage()
    held = bytearray(b"x") * size
    during = usage()
    del held
    after = usage()
    assert during.memory_bytes >= before.memory_bytes + size / 2
    assert after.memory_bytes <= during.memory_bytes - size / 2
    assert after.peak_bytes >= before.memory_bytes + size / 2
    assert after.cpu_ns >= during.cpu_ns >= before.cpu_ns > 0


@pytest.mark.parametrize(("initialized", "held"), [(True, 300), (False, 0)])
def test_gpu_memory_is_that_of_all_gpus_once_one_is_used(
    monkeypatch: pytest.MonkeyPatch, initialized: bool, held: int
) -> None:
    cuda = SimpleNamespace(
        is_initialized=lambda: initialized,
        device_count=lambda: 2,
        memory_reserved=lambda index: 100 * (index + 1),
    )
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)
    assert usage().gpu_bytes == held


def test_gpu_use_is_the_mean_of_the_gpus_that_the_process_holds_memory_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 3,
        memory_reserved=lambda index: index and 100,
        utilization=lambda index: 40 * index,
    )
    assert gpu_use() is None, "there is no GPU"
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)
    assert gpu_use() == pytest.approx(0.6)
    del cuda.utilization  # torch raises if nvidia-ml-py is not installed
    assert gpu_use() is None

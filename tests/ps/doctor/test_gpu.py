"""GPUs, Gloo and NCCL: what the doctor says of them, and how it holds them to their sums."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hubring.ps.config.server import ServerConfig
from hubring.ps.doctor import software as gpu
from hubring.ps.doctor.check import GIB, Subject, ok
from tests.ps.doctor.case import Case, fails, judgements, omits, only, warns

HERE_ALONE = Subject(ServerConfig(), None, None, {}, 20.0)
TORCH, CPU_TORCH = ("2.13.0+cu130", "13.0"), ("2.13.0+cpu", None)
FILES = ["/dev/nvidia0"]
H100 = "NVIDIA H100 (sm_90)"

no_gpu = gpu.judge_no_gpu

CASES = [
    fails(gpu.judge_gpu(0, H100, 70 * GIB, 80 * GIB, "ECC"), "cannot compute: ECC", "nvidia-smi -q -i 0"),
    warns(gpu.judge_gpu(0, H100, 2 * GIB, 80 * GIB, ""), "other processes use the rest", "nvidia-smi"),
    omits(no_gpu(*TORCH, [], None, ""), "no GPU here (torch 2.13.0+cu130 is built for CUDA 13.0)"),
    warns(no_gpu(*CPU_TORCH, FILES, None, ""), "built without CUDA: training runs", "pip install torch"),
    omits(no_gpu(*TORCH, FILES, "", ""), "CUDA_VISIBLE_DEVICES='' hides the 1 GPU(s)"),
    fails(no_gpu(*TORCH, FILES, None, "too old"), "cannot use them: too old", "install a newer driver"),
    fails(no_gpu(*TORCH, FILES, None, ""), "torch sees no GPU", "a newer driver"),
    warns(gpu.judge_nccl(None, 2, ""), "the 2 GPU(s) copies through host memory", "ps-worker --backend gloo"),
    fails(gpu.judge_nccl("2.27.5", 2, "system error"), "failed: system error", "NCCL_DEBUG=INFO"),
    fails(gpu.judge_gloo("127.0.0.1", "unreachable"), "failed: unreachable", "ip link set lo up"),
    fails(gpu.judge_gloo("10.0.0.7", "timed out"), "failed: timed out", "reach itself at 10.0.0.7 on any"),
]


@judgements(CASES)
def test_each_finding_has_its_message_and_its_fix(case: Case) -> None:
    case.check()


def see_gpus(monkeypatch: pytest.MonkeyPatch, count: int = 2) -> None:
    """Lets torch be one that is built for CUDA and finds GPUs; what is computed there is on the CPU."""
    ones = torch.ones
    properties = SimpleNamespace(name="NVIDIA H100", total_memory=80 * GIB, major=9, minor=0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "ones", lambda *shape, device, dtype: ones(*shape, dtype=dtype))
    for name, value in {
        "is_available": True,
        "init": None,
        "device_count": count,
        "get_device_properties": properties,
        "mem_get_info": (70 * GIB, 80 * GIB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


def test_each_gpu_that_torch_sees_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch)
    found = [*gpu.examine_cuda({})]
    assert [(finding.name, finding.state) for finding in found] == [("CUDA 0", "ok"), ("CUDA 1", "ok")]
    assert "NVIDIA H100 (sm_90), 70 GiB of 80 GiB free" in found[0].found


def test_a_gpu_that_does_not_compute_is_told_by_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: int) -> None:
        raise RuntimeError("CUDA error: device-side assert\nand more")

    see_gpus(monkeypatch, count=1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    assert "cannot compute: CUDA error: device-side assert" in only(gpu.examine_cuda({})).found
    monkeypatch.setattr(torch.cuda, "init", lambda: fail(0))
    monkeypatch.setattr(gpu, "device_files", lambda: ["/dev/nvidia0"])
    assert "cannot use them" in only(gpu.examine_cuda({})).found


def test_nccl_is_held_to_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))

    def add(parts: list[torch.Tensor]) -> None:
        total = torch.stack(parts).sum(0)
        for part in parts:
            part.copy_(total)

    monkeypatch.setattr(torch.cuda.nccl, "all_reduce", add)
    assert only(gpu.examine_nccl()) == ok(
        "NCCL", "version 2.27.5 in torch's build: an allreduce over the 2 GPU(s) of this machine is correct"
    )
    monkeypatch.setattr(torch.cuda.nccl, "all_reduce", lambda parts: parts[1].fill_(3))
    assert "the sum is wrong on cuda:0" in only(gpu.examine_nccl()).found


def test_gloo_is_held_to_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_add", lambda rank, *_: torch.tensor([3.0, 3.0 + rank]))
    assert "the sum is wrong on rank 1" in only(gpu.examine_gloo(HERE_ALONE)).found

"""GPUs: what the doctor says of them, and what it asks torch."""

from __future__ import annotations

import pytest
import torch

from hubring.ps.doctor import gpu
from hubring.ps.doctor.finding import GIB
from hubring.ps.doctor.gpu import Cuda, Gpu
from tests.ps.doctor.case import Case, judgements, only
from tests.ps.doctor.fake_gpus import see_gpus

H100 = Gpu("NVIDIA H100", (9, 0), 70 * GIB, 80 * GIB)
CUDA = Cuda(
    "2.13.0+cu130", "13.0", ["sm_80", "sm_90", "compute_90"], ["/dev/nvidia0"], "580.95.05", None, [H100], ""
)
BLIND = CUDA._replace(gpus=[], arches=[])
NO_GPU = BLIND._replace(files=[], driver=None)

CASES = [
    Case(only(gpu.judge(CUDA)), "ok", "NVIDIA H100 (sm_90), 70 GiB of 80 GiB free, driver 580.95.05"),
    Case(only(gpu.judge(NO_GPU)), "skipped", "no GPU here (torch 2.13.0+cu130 is built for CUDA 13.0)"),
    Case(
        only(gpu.judge(NO_GPU._replace(torch="2.13.0+cpu", built_for=None))),
        "skipped",
        "no GPU here (torch 2.13.0+cpu is built without CUDA)",
    ),
    Case(
        only(gpu.judge(BLIND._replace(torch="2.13.0+cpu", built_for=None))),
        "warning",
        "1 GPU(s) here, but torch 2.13.0+cpu is built without CUDA: training runs on the CPU",
        "pip install torch --index-url",
    ),
    Case(
        only(gpu.judge(BLIND._replace(visible=""))), "skipped", "CUDA_VISIBLE_DEVICES='' hides the 1 GPU(s)"
    ),
    Case(
        only(gpu.judge(BLIND._replace(driver="470.57", trouble="The NVIDIA driver is too old"))),
        "failure",
        "built for CUDA 13.0 and cannot use them (driver 470.57): The NVIDIA driver is too old",
        "a newer driver, or torch for the CUDA version that nvidia-smi shows",
    ),
    Case(
        only(gpu.judge(BLIND._replace(driver=None))),
        "failure",
        "(driver version unknown): torch sees no GPU",
        "a newer driver",
    ),
    Case(
        only(gpu.judge(CUDA._replace(gpus=[H100._replace(name="Tesla P100", capability=(6, 0))]))),
        "failure",
        "Tesla P100 (sm_60): torch 2.13.0+cu130 has kernels only for sm_80, sm_90, compute_90",
        "leave this GPU out of CUDA_VISIBLE_DEVICES",
    ),
    Case(
        only(gpu.judge(CUDA._replace(gpus=[H100._replace(trouble="uncorrectable ECC error")]))),
        "failure",
        "cannot compute: uncorrectable ECC error",
        "nvidia-smi -q -i 0; or leave this GPU out of CUDA_VISIBLE_DEVICES",
    ),
    Case(
        only(gpu.judge(CUDA._replace(gpus=[H100._replace(free=2 * GIB)]))),
        "warning",
        "2 GiB of 80 GiB free: other processes use the rest",
        "find these processes with nvidia-smi",
    ),
]


@judgements(CASES)
def test_what_is_found_has_its_message_and_its_fix(case: Case) -> None:
    case.check()


@pytest.mark.parametrize(
    ("capability", "arches", "runs"),
    [
        ((9, 0), ["sm_90"], True),
        ((8, 9), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["compute_80"], True),
        ((7, 0), ["compute_80"], False),
        ((9, 0), ["sm_90a"], True),
        ((12, 0), ["sm_120"], True),
        ((12, 1), ["sm_120a"], False),
        ((12, 1), ["sm_120f"], True),
        ((9, 0), [], False),
    ],
)
def test_a_build_fits_a_gpu_as_nvidia_says(
    capability: tuple[int, int], arches: list[str], runs: bool
) -> None:
    assert gpu.fits(capability, arches) == runs


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n",
            "535.129.03",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n",
            "580.95.05",
        ),
        ("nothing of the kind", None),
    ],
)
def test_the_drivers_version_is_read(text: str, version: str | None) -> None:
    assert gpu.driver_version(text) == version


def test_each_gpu_that_torch_sees_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, (9, 0))
    found = [*gpu.examine({})]
    assert [(finding.name, finding.state) for finding in found] == [("CUDA 0", "ok"), ("CUDA 1", "ok")]
    assert "NVIDIA H100 (sm_90), 70 GiB of 80 GiB free" in found[0].found
    assert found[0].found.endswith("torch for CUDA 13.0")


def test_a_gpu_without_kernels_is_asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, (6, 1))
    monkeypatch.setattr(torch.cuda, "mem_get_info", None)
    assert [finding.state for finding in gpu.examine({})] == ["failure"] * 2


def test_a_gpu_that_does_not_compute_is_told_by_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: int) -> None:
        raise RuntimeError("CUDA error: device-side assert\nand more")

    see_gpus(monkeypatch, (9, 0), count=1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    assert "cannot compute: CUDA error: device-side assert" in only(gpu.examine({})).found
    monkeypatch.setattr(torch.cuda, "init", lambda: fail(0))
    monkeypatch.setattr(gpu, "files", lambda: ["/dev/nvidia0"])
    assert "cannot use them" in only(gpu.examine({})).found

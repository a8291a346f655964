"""GPUs: which ones exist, whether torch's build and the driver support them, and whether they compute."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hubring.ps.doctor.finding import Finding, failure, format_bytes, ok, skipped, warning

CUDA = "CUDA"
VISIBLE = "CUDA_VISIBLE_DEVICES"
LEAST_FREE = 0.1
"""Fraction of a GPU's memory. If less is free, another process uses the GPU."""

_DRIVER = Path("/proc/driver/nvidia/version")
_KERNEL_MODULE = re.compile(r"Kernel Module.*?\s(\d+\.[\d.]+)\s")
_ARCH = re.compile(r"(sm|compute)_(\d+)([af]?)")
_INSTALL = "pip install torch --index-url https://download.pytorch.org/whl/cuXYZ"


class Gpu(NamedTuple):
    """A GPU that torch sees.

    Attributes:
        name: The model.
        capability: Compute capability; (9, 0) runs kernels for sm_90.
        free: Free memory in bytes.
        total: Total memory in bytes.
        trouble: Why the GPU cannot compute, or empty.
    """

    name: str
    capability: tuple[int, int]
    free: int
    total: int
    trouble: str = ""


class Cuda(NamedTuple):
    """The CUDA installation.

    Attributes:
        torch: torch's version.
        built_for: The CUDA version that torch was built for, or None.
        arches: The architectures that torch's kernels were compiled for, such as sm_90 or compute_120.
        files: The GPU device files of this process, such as /dev/nvidia0.
        driver: The driver's version, if it is known.
        visible: CUDA_VISIBLE_DEVICES, if it is set.
        gpus: The GPUs that torch sees.
        trouble: torch's error if it sees no GPU, or empty.
    """

    torch: str
    built_for: str | None
    arches: Sequence[str]
    files: Sequence[str]
    driver: str | None
    visible: str | None
    gpus: Sequence[Gpu]
    trouble: str


def judge(cuda: Cuda) -> list[Finding]:
    """Returns one finding per GPU that torch sees, or a single one if it sees none."""
    if cuda.gpus:
        return [_judge_gpu(index, gpu, cuda) for index, gpu in enumerate(cuda.gpus)]
    return [_judge_blind(cuda)]


def fits(capability: tuple[int, int], arches: Sequence[str]) -> bool:
    """Returns whether kernels of one of the architectures run on a GPU of this capability.

    A kernel for sm_XY runs on X.Z with Z >= Y. A kernel for sm_XYa runs on X.Y only. compute_XY is compiled
    at load time for X.Y and every later capability (CUDA C++ Programming Guide, "Application Compatibility").
    """
    return any(_runs(match, capability) for arch in arches if (match := _ARCH.fullmatch(arch)))


def driver_version(text: str) -> str | None:
    """Returns the driver's version from the text of /proc/driver/nvidia/version."""
    match = _KERNEL_MODULE.search(text)
    return match[1] if match else None


def files() -> list[str]:
    """Returns the GPU device files of this process."""
    return sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))


def examine(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Queries torch, and runs a sum on each GPU."""
    import torch

    gpus: list[Gpu] = []
    trouble = ""
    arches: list[str] = []
    if torch.version.cuda is not None and (files() or torch.cuda.is_available()):
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            arches = torch.cuda.get_arch_list()
            gpus = [_gpu(index, arches) for index in range(torch.cuda.device_count())]
        except RuntimeError as error:
            trouble = str(error).splitlines()[0]
    version, built_for, visible = str(torch.__version__), torch.version.cuda, variables.get(VISIBLE)
    driver = driver_version(_DRIVER.read_text()) if _DRIVER.exists() else None
    yield from judge(Cuda(version, built_for, arches, files(), driver, visible, gpus, trouble))


def _judge_blind(cuda: Cuda) -> Finding:
    """Explains why torch sees no GPU."""
    built = f"torch {cuda.torch} is built " + (
        f"for CUDA {cuda.built_for}" if cuda.built_for else "without CUDA"
    )
    if not cuda.files:
        return skipped(CUDA, f"no GPU here ({built}); in a container, GPUs need docker run --gpus all")
    here = f"{len(cuda.files)} GPU(s) here"
    if cuda.built_for is None:
        fix = f"{_INSTALL}, for the CUDA version that nvidia-smi shows or an older one"
        return warning(CUDA, f"{here}, but {built}: training runs on the CPU", fix)
    if cuda.visible is not None and not cuda.trouble:
        return skipped(CUDA, f"{VISIBLE}={cuda.visible!r} hides the {here}")
    driver = f"driver {cuda.driver}" if cuda.driver else "driver version unknown"
    return failure(
        CUDA,
        f"{here}, but {built} and cannot use them ({driver}): {cuda.trouble or 'torch sees no GPU'}",
        f"install a newer driver, or torch for the CUDA version that nvidia-smi shows: {_INSTALL}",
    )


def _judge_gpu(index: int, gpu: Gpu, cuda: Cuda) -> Finding:
    name = f"{CUDA} {index}"
    about = f"{gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]})"
    hide = f"leave this GPU out of {VISIBLE}"
    if not fits(gpu.capability, cuda.arches):
        return failure(
            name,
            f"{about}: torch {cuda.torch} has kernels only for {', '.join(cuda.arches)}",
            f"{_INSTALL}, in a version that supports this GPU (pytorch.org, previous versions); or {hide}",
        )
    if gpu.trouble:
        found = f"{about} cannot compute: {gpu.trouble}"
        return failure(name, found, f"check nvidia-smi -q -i {index}; or {hide}")
    room = f"{format_bytes(gpu.free)} of {format_bytes(gpu.total)} free"
    if gpu.free < LEAST_FREE * gpu.total:
        fix = "find these processes with nvidia-smi and stop them"
        return warning(name, f"{about}, {room}: other processes use the rest", fix)
    return ok(name, f"{about}, {room}, driver {cuda.driver or 'unknown'}, torch for CUDA {cuda.built_for}")


def _runs(match: re.Match[str], capability: tuple[int, int]) -> bool:
    kind, digits, special = match.groups()
    compiled = divmod(int(digits), 10)
    if special == "a":
        return compiled == capability
    if kind == "compute" and not special:
        return compiled <= capability
    return compiled[0] == capability[0] and compiled[1] <= capability[1]


def _gpu(index: int, arches: Sequence[str]) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(index)
    gpu = Gpu(properties.name, (properties.major, properties.minor), 0, properties.total_memory)
    if not fits(gpu.capability, arches):
        return gpu
    try:
        free, total = torch.cuda.mem_get_info(index)
        added = float(torch.ones(1024, device=f"cuda:{index}").sum())
    except RuntimeError as error:
        return gpu._replace(trouble=str(error).splitlines()[0])
    wrong = "" if added == 1024 else f"1024 ones add up to {added:g}"
    return gpu._replace(free=free, total=total, trouble=wrong)

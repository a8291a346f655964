"""GPUs: which are here, whether torch's build and the driver fit them, and whether they compute."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hubring.ps.doctor.finding import Finding, failure, ok, skipped, warning
from hubring.ps.doctor.sizes import spelt

NAME = "CUDA"
VISIBLE = "CUDA_VISIBLE_DEVICES"
LEAST_FREE = 0.1
"""Of a GPU's memory; with less free, somebody else has taken it."""

_DRIVER = Path("/proc/driver/nvidia/version")
_KERNEL_MODULE = re.compile(r"Kernel Module.*?\s(\d+\.[\d.]+)\s")
_ARCH = re.compile(r"(sm|compute)_(\d+)([af]?)")
_INSTALL = "pip install torch --index-url https://download.pytorch.org/whl/cuXYZ"


class Gpu(NamedTuple):
    """One that torch sees.

    Attributes:
        name: As its maker calls it.
        capability: Of its kernels: (9, 0) runs those for sm_90.
        free: Bytes that nobody has taken.
        total: Bytes.
        trouble: Why it does not compute; empty if it does.
    """

    name: str
    capability: tuple[int, int]
    free: int
    total: int
    trouble: str = ""


class Cuda(NamedTuple):
    """What there is of it.

    Attributes:
        torch: torch's version.
        built_for: The CUDA that torch was built for; None: for none.
        arches: What torch's kernels were compiled for: sm_90, compute_120.
        files: GPUs that the kernel shows this process, as /dev/nvidia0.
        driver: Its version, if it tells.
        visible: What CUDA_VISIBLE_DEVICES says, if it is set.
        gpus: What torch sees.
        trouble: Why torch sees none; empty if it did not say.
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
    """One finding for all of it, or one for each GPU that torch sees."""
    if cuda.gpus:
        return [_judge_gpu(index, gpu, cuda) for index, gpu in enumerate(cuda.gpus)]
    built = f"torch {cuda.torch} is built for CUDA {cuda.built_for}"
    if not cuda.files:
        built = built if cuda.built_for else f"torch {cuda.torch} is built without CUDA"
        return [skipped(NAME, f"no GPU here ({built}); a container sees one with docker run --gpus all")]
    here = f"{len(cuda.files)} GPU(s) here"
    if cuda.built_for is None:
        return [
            warning(
                NAME,
                f"{here}, but torch {cuda.torch} is built without CUDA: training runs on the CPU",
                f"{_INSTALL}, of a CUDA that nvidia-smi shows or an older one",
            )
        ]
    if cuda.visible is not None and not cuda.trouble:
        return [skipped(NAME, f"{VISIBLE}={cuda.visible!r} hides the {here}")]
    driver = f"driver {cuda.driver}" if cuda.driver else "no driver tells its version"
    return [
        failure(
            NAME,
            f"{here}, but {built} and cannot use them ({driver}): {cuda.trouble or 'it sees none'}",
            f"a newer driver, or torch for the CUDA that nvidia-smi shows: {_INSTALL}",
        )
    ]


def fits(capability: tuple[int, int], arches: Sequence[str]) -> bool:
    """Whether one of the arches' kernels runs on a GPU of this capability.

    A kernel for sm_XY runs on any X.Z from Y on, one for sm_XYa on X.Y alone, and compute_XY is compiled
    for any later one as it is loaded (CUDA C++ Programming Guide, "Application Compatibility").
    """
    return any(_runs(match, capability) for arch in arches if (match := _ARCH.fullmatch(arch)))


def driver_version(text: str) -> str | None:
    """The driver's, of what /proc/driver/nvidia/version holds."""
    match = _KERNEL_MODULE.search(text)
    return match[1] if match else None


def files() -> list[str]:
    """GPUs that the kernel shows this process."""
    return sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))


def examine(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Asks torch, and lets each GPU add."""
    yield from judge(_look(variables))


def _judge_gpu(index: int, gpu: Gpu, cuda: Cuda) -> Finding:
    name = f"{NAME} {index}"
    about = f"{gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]})"
    hide = f"{VISIBLE} without it"
    if not fits(gpu.capability, cuda.arches):
        return failure(
            name,
            f"{about}: torch {cuda.torch} has kernels for {', '.join(cuda.arches)} only",
            f"{_INSTALL}, of a version that still has them (pytorch.org, previous versions); or {hide}",
        )
    if gpu.trouble:
        return failure(
            name, f"{about} does not compute: {gpu.trouble}", f"nvidia-smi -q -i {index}; or {hide}"
        )
    room = f"{spelt(gpu.free)} of {spelt(gpu.total)} free"
    if gpu.free < LEAST_FREE * gpu.total:
        return warning(name, f"{about}, {room}: others have the rest", "nvidia-smi shows who; stop them")
    return ok(name, f"{about}, {room}, driver {cuda.driver or 'unknown'}, torch for CUDA {cuda.built_for}")


def _runs(match: re.Match[str], capability: tuple[int, int]) -> bool:
    kind, digits, special = match.groups()
    compiled = divmod(int(digits), 10)
    if special == "a":
        return compiled == capability
    if kind == "compute" and not special:
        return compiled <= capability
    return compiled[0] == capability[0] and compiled[1] <= capability[1]


def _look(variables: Mapping[str, str]) -> Cuda:
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
    return Cuda(
        torch=str(torch.__version__),
        built_for=torch.version.cuda,
        arches=arches,
        files=files(),
        driver=driver_version(_DRIVER.read_text()) if _DRIVER.exists() else None,
        visible=variables.get(VISIBLE),
        gpus=gpus,
        trouble=trouble,
    )


def _gpu(index: int, arches: Sequence[str]) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    if not fits(capability, arches):
        return Gpu(properties.name, capability, 0, properties.total_memory)
    try:
        free, total = torch.cuda.mem_get_info(index)
        added = float(torch.ones(1024, device=f"cuda:{index}").sum())
    except RuntimeError as error:
        return Gpu(properties.name, capability, 0, properties.total_memory, str(error).splitlines()[0])
    wrong = "" if added == 1024 else f"1024 ones add up to {added:g}"
    return Gpu(properties.name, capability, free, total, wrong)

"""Software: installed packages, settings, torch, the GPUs that it uses, and the allreduce libraries.

They are Gloo, at the address that a ring uses, and NCCL over this machine's GPUs.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hubring.ps.config.sources import faults, load_server, load_worker
from hubring.ps.config.values import is_loopback
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.packages import TESTED_TORCH, untested_torch
from hubring.ps.core.types import PROTOCOL
from hubring.ps.doctor.check import (
    LOOPBACK,
    Finding,
    Subject,
    failure,
    format_bytes,
    ok,
    skipped,
    warning,
)
from hubring.ps.doctor.machine import allowed_cores

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from torch import Tensor

PACKAGES, TORCH, THREADS, SETTINGS = "packages", "torch", "torch threads", "settings"
PACKAGE = "hubring"
SHOWN = ("grpcio", "protobuf")
"""Packages whose versions the finding shows."""

SIDE = 64

_OLD_PROCESSOR = "export ATEN_CPU_CAPABILITY=default"


def requirements(lines: Iterable[str]) -> list[Requirement]:
    """Parses a package's requirements, without those of its extras."""
    from packaging.requirements import Requirement  # imported here: the check reports a missing package

    found = [Requirement(line) for line in lines]
    return [each for each in found if each.marker is None or each.marker.evaluate({"extra": ""})]


def needs() -> list[Requirement]:
    """Returns the requirements of Hubring."""
    return requirements(metadata.requires(PACKAGE) or ())


def meets(version: str | None, requirement: Requirement) -> bool:
    """Returns whether a version meets a requirement. NVIDIA's 2.13.0a0+git1 counts as 2.13.0."""
    from packaging.version import InvalidVersion, Version

    try:
        return version is not None and requirement.specifier.contains(Version(version).base_version)
    except InvalidVersion:
        return False


def judge_packages(needed: Iterable[Requirement], versions: Mapping[str, str | None], about: str) -> Finding:
    """Judges whether every package is installed and new enough. `about` describes Hubring."""
    wrong = [each for each in needed if not meets(versions[each.name], each)]
    if wrong:
        shown = ", ".join(_shortfall(each, versions[each.name]) for each in wrong)
        fix = "pip install " + " ".join(f"'{each}'" for each in wrong)
        return failure(PACKAGES, f"{about}: {shown}", fix)
    shown = ", ".join(f"{name} {versions[name]}" for name in SHOWN if versions.get(name))
    return ok(PACKAGES, f"{about}, {shown}")


def examine_packages() -> Iterator[Finding]:
    """Reads the installed versions, then imports the stubs, which raise if gRPC or protobuf is too old."""
    needed = [each for each in needs() if each.name != TORCH]
    about = f"{PACKAGE} {metadata.version(PACKAGE)} (protocol {PROTOCOL}), Python {platform.python_version()}"
    yield judge_packages(needed, {each.name: _installed(each.name) for each in needed}, about)
    import hubring.protos.control_pb2_grpc
    import hubring.protos.data_pb2_grpc  # noqa: F401 - the import is the check


def judge_torch(version: str, instructions: str, right: bool, needed: Requirement) -> Finding:
    """Judges torch's version and its result.

    Args:
        version: torch's version.
        instructions: The CPU instructions that torch uses, such as AVX2.
        right: Whether the product of two matrices was correct.
        needed: The requirement on torch.
    """
    if not meets(version, needed):
        return failure(TORCH, _shortfall(needed, version), f"pip install '{needed}'")
    if not right:
        found = f"torch {version} computes a wrong product of two matrices of ones"
        fix = f"pip install --force-reinstall torch; if that does not help, {_OLD_PROCESSOR}"
        return failure(TORCH, found, fix)
    if newer := untested_torch(version):
        return warning(TORCH, newer, TESTED_TORCH)
    return ok(TORCH, f"{version}, computes with {instructions}")


def judge_threads(threads: int, cores: float) -> Finding:
    """Judges whether torch has a core for each of its threads."""
    if threads <= max(1.0, cores):
        return ok(THREADS, f"{threads} on {cores:.3g} core(s)")
    return warning(
        THREADS,
        f"torch starts {threads} threads on {cores:.3g} core(s): the threads wait for each other",
        f"export OMP_NUM_THREADS={max(1, int(cores))} (divided by the workers on this machine)",
    )


def examine_torch() -> Iterator[Finding]:
    """Imports torch and multiplies two matrices."""
    import torch

    ones = torch.ones(SIDE, SIDE, dtype=torch.float32, device="cpu")
    right = bool((ones @ ones == SIDE).all())
    [needed] = [each for each in needs() if each.name == TORCH]
    yield judge_torch(str(torch.__version__), torch.backends.cpu.get_cpu_capability(), right, needed)
    yield judge_threads(torch.get_num_threads(), allowed_cores())


def judge_settings(wrong: Mapping[str, str], contradiction: str, given: Collection[str]) -> Iterator[Finding]:
    """Yields one finding for each wrong setting, or one for all settings.

    Args:
        wrong: Error message by variable or flag.
        contradiction: The error message about settings that contradict each other, or empty.
        given: The PS_* variables that are set.
    """
    for name, found in wrong.items():
        yield failure(SETTINGS, found, f"correct or remove {name}")
    if contradiction:
        fix = "unset one of them, or pass the flag, which overrides the environment and the file"
        yield warning(SETTINGS, contradiction, fix)
    elif not wrong:
        yield ok(SETTINGS, f"{', '.join(given)}: valid" if given else "no PS_* variable is set")


def examine_settings(subject: Subject) -> Iterator[Finding]:
    """Reads the environment and the settings file."""
    wrong = faults(subject.variables) | _file_fault(subject.config_file)
    given = sorted(name for name in subject.variables if name.startswith("PS_"))
    yield from judge_settings(wrong, "" if wrong else _contradiction(subject), given)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _shortfall(requirement: Requirement, version: str | None) -> str:
    least = str(requirement.specifier).removeprefix(">=")
    return (
        f"{requirement.name} {version} is older than {least}" if version else f"{requirement.name} is missing"
    )


def _file_fault(file: Path | None) -> dict[str, str]:
    """Returns the error in the settings file alone, if there is one."""
    try:
        load_server({}, file, {})
    except ConfigError as error:
        return {"--config": str(error)}
    return {}


def _contradiction(subject: Subject) -> str:
    """Returns the error that a server or a worker would raise at its start, or an empty string.

    The worker gets a server address, so that settings which need one are no error.
    """
    flags = {} if "PS_SERVER" in subject.variables else {"server": subject.server or "127.0.0.1:5555"}
    try:
        load_server({}, subject.config_file, subject.variables)
        load_worker(flags, subject.config_file, subject.variables)
    except ConfigError as error:
        return str(error)
    return ""


CUDA = "CUDA"
VISIBLE = "CUDA_VISIBLE_DEVICES"
LEAST_FREE = 0.1
"""Fraction of a GPU's memory. If less is free, another process uses the GPU."""

_INSTALL = "pip install torch --index-url https://download.pytorch.org/whl/cuXYZ"


def judge_no_gpu(
    version: str, built_for: str | None, files: Sequence[str], visible: str | None, trouble: str
) -> Finding:
    """Explains why torch sees no GPU.

    Args:
        version: torch's version.
        built_for: The CUDA version that torch was built for, or None.
        files: The GPU device files of this process, such as /dev/nvidia0.
        visible: CUDA_VISIBLE_DEVICES, if it is set.
        trouble: torch's error, or empty.
    """
    built = f"torch {version} is built " + (f"for CUDA {built_for}" if built_for else "without CUDA")
    if not files:
        return skipped(CUDA, f"no GPU here ({built}); in a container, GPUs need docker run --gpus all")
    here = f"{len(files)} GPU(s) here"
    if built_for is None:
        fix = f"{_INSTALL}, for the CUDA version that nvidia-smi shows or an older one"
        return warning(CUDA, f"{here}, but {built}: training runs on the CPU", fix)
    if visible is not None and not trouble:
        return skipped(CUDA, f"{VISIBLE}={visible!r} hides the {here}")
    found = f"{here}, but {built} and cannot use them: {trouble or 'torch sees no GPU'}"
    fix = f"install a newer driver, or torch for the CUDA version that nvidia-smi shows: {_INSTALL}"
    return failure(CUDA, found, fix)


def judge_gpu(index: int, about: str, free: int, total: int, trouble: str) -> Finding:
    """Judges whether a GPU computes and has memory left.

    Args:
        index: torch's number of the GPU.
        about: The model and its architecture.
        free: Free memory in bytes.
        total: Total memory in bytes.
        trouble: Why the GPU cannot compute, or empty.
    """
    name = f"{CUDA} {index}"
    if trouble:
        fix = f"check nvidia-smi -q -i {index}; if torch has no kernel for it: {_INSTALL}, in another version"
        return failure(name, f"{about} cannot compute: {trouble}", f"{fix}; or leave it out of {VISIBLE}")
    room = f"{format_bytes(free)} of {format_bytes(total)} free"
    if free < LEAST_FREE * total:
        fix = "find these processes with nvidia-smi and stop them"
        return warning(name, f"{about}, {room}: other processes use the rest", fix)
    return ok(name, f"{about}, {room}")


def device_files() -> list[str]:
    """Returns the GPU device files of this process."""
    return sorted(map(str, Path("/dev").glob("nvidia[0-9]*")))


def examine_cuda(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Queries torch, and runs a sum on each GPU."""
    import torch

    gpus, trouble, files = 0, "", device_files()
    if torch.version.cuda is not None and (files or torch.cuda.is_available()):
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            gpus = torch.cuda.device_count()
        except RuntimeError as error:
            trouble = str(error).splitlines()[0]
    if not gpus:
        version = str(torch.__version__)
        yield judge_no_gpu(version, torch.version.cuda, files, variables.get(VISIBLE), trouble)
    for index in range(gpus):
        yield _try_gpu(index)


def _try_gpu(index: int) -> Finding:
    import torch

    properties = torch.cuda.get_device_properties(index)
    about = f"{properties.name} (sm_{properties.major}{properties.minor})"
    try:
        free, total = torch.cuda.mem_get_info(index)
        added = float(torch.ones(1024, dtype=torch.float32, device=f"cuda:{index}").sum())
    except RuntimeError as error:
        return judge_gpu(index, about, 0, properties.total_memory, str(error).splitlines()[0])
    return judge_gpu(index, about, free, total, "" if added == 1024 else f"1024 ones add up to {added:g}")


GLOO, NCCL = "Gloo", "NCCL"
NCCL_FIX = "run ps-worker with NCCL_DEBUG=INFO to see the cause; until it is fixed, use --backend gloo"
RANKS = 2
SHARE, MOST_SECONDS = 0.4, 10.0
"""Time limit for Gloo's ranks: a share of the check's seconds, because the check loads torch first."""


def judge_gloo(address: str, trouble: str) -> Finding:
    """Judges whether a ring can work at this address. `trouble` is why the allreduce failed, or empty."""
    if not trouble:
        return ok(GLOO, f"{RANKS} ranks on {address} connected and reduced correctly")
    if is_loopback(address):
        fix = "run ip link set lo up; remove filters on loopback (iptables -L, nft list ruleset)"
    else:
        fix = f"let this machine reach itself at {address} on any TCP port (iptables -L, nft list ruleset)"
    return failure(GLOO, f"an allreduce of {RANKS} ranks on {address} failed: {trouble}", fix)


def examine_gloo(subject: Subject) -> Iterator[Finding]:
    """Runs an allreduce of two ranks, on threads, opened as the ring opens its group."""
    try:
        address = subject.ring_address
    except ConfigError:  # the interfaces check reports it; without a server, a ring uses loopback
        address = LOOPBACK
    yield judge_gloo(address, _gloo_trouble(address, min(SHARE * subject.seconds, MOST_SECONDS)))


def judge_nccl(version: str | None, gpus: int, trouble: str) -> Finding:
    """Judges whether `--backend nccl` can work. `trouble` is why the allreduce failed, or empty."""
    build = f"version {version} in torch's build"
    if gpus == 0:
        about = build if version else "not in torch's build either"
        return skipped(NCCL, f"torch finds no usable GPU, and NCCL needs GPUs ({about})")
    if version is None:
        found = f"not in torch's build: a ring over the {gpus} GPU(s) copies through host memory"
        return warning(NCCL, found, "use ps-worker --backend gloo, or a CUDA build of torch for Linux")
    if trouble:
        return failure(NCCL, f"{build}: an allreduce over the {gpus} GPU(s) failed: {trouble}", NCCL_FIX)
    return ok(NCCL, f"{build}: an allreduce over the {gpus} GPU(s) of this machine is correct")


def examine_nccl() -> Iterator[Finding]:
    """Runs an allreduce over all GPUs."""
    import torch
    from torch import distributed

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    version = None
    if distributed.is_available() and distributed.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    yield judge_nccl(version, gpus, _nccl_trouble(gpus) if version and gpus else "")


def _gloo_trouble(address: str, seconds: float) -> str:
    from torch import distributed

    if not (distributed.is_available() and distributed.is_gloo_available()):
        return "torch is built without Gloo"
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    store = HashStore()

    def allreduce() -> list[Tensor]:
        with ThreadPoolExecutor(RANKS) as threads:
            ranks = [threads.submit(_add, rank, address, store, seconds) for rank in range(RANKS)]
            return [rank.result() for rank in ranks]

    return _trouble(allreduce, "rank ")


def _add(rank: int, address: str, store: Any, limit: float) -> Tensor:
    import torch
    from torch.distributed import ProcessGroupGloo

    from hubring.ps.core.torch_internals import gloo_group

    device = ProcessGroupGloo.create_device(hostname=address)
    group = gloo_group(store, rank, RANKS, device, limit)
    part = torch.full((1 << 16,), rank + 1.0, dtype=torch.float32, device="cpu")
    group.allreduce([part]).wait()
    return part


def _nccl_trouble(gpus: int) -> str:
    import torch

    def allreduce() -> list[Tensor]:
        ones = (torch.ones(1024, dtype=torch.float32, device=f"cuda:{index}") for index in range(gpus))
        full = [one * number for number, one in enumerate(ones, 1)]
        torch.cuda.nccl.all_reduce(full)  # type: ignore[no-untyped-call]
        return full

    return _trouble(allreduce, "cuda:")


def _trouble(allreduce: Callable[[], list[Tensor]], place: str) -> str:
    """Returns what is wrong with an allreduce of 1, 2, ... by place; empty if nothing is."""
    try:
        sums = allreduce()
        expected = sum(range(len(sums) + 1))
        wrong = [rank for rank, total in enumerate(sums) if not bool((total == expected).all())]
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return f"the sum is wrong on {', '.join(f'{place}{rank}' for rank in wrong)}" if wrong else ""

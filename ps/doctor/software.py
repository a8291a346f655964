"""What programs need: packages that are new enough, a torch that computes, and settings that are allowed."""

from __future__ import annotations

import platform
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from hubring.ps.config.sources import faults, load_server, load_worker
from hubring.ps.core.errors import ConfigError
from hubring.ps.core.types import PROTOCOL
from hubring.ps.doctor import isolation
from hubring.ps.doctor.finding import Finding, failure, ok, warning
from hubring.ps.doctor.isolation import LAST_SECONDS, Check
from hubring.ps.doctor.machine import allowed_cores
from hubring.ps.doctor.subject import Subject

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PACKAGES, TORCH, THREADS, SETTINGS = "packages", "torch", "torch threads", "settings"
OURS = "hubring"
SHOWN = ("grpcio", "protobuf")
"""Packages whose versions people ask for."""

SIDE = 64
LAST_SHARE = 0.1
"""Of a check's seconds: what checks that hang may take to end, and again to be waited for once killed."""

_OLD_PROCESSOR = "export ATEN_CPU_CAPABILITY=default"


def requirements(lines: Iterable[str]) -> list[Requirement]:
    """A package's own requirements, without those of its extras."""
    from packaging.requirements import Requirement  # its absence is for the check to report

    found = [Requirement(line) for line in lines]
    return [each for each in found if each.marker is None or each.marker.evaluate({"extra": ""})]


def needs() -> list[Requirement]:
    """What our own package requires."""
    return requirements(metadata.requires(OURS) or ())


def meets(version: str | None, requirement: Requirement) -> bool:
    """Whether the version's release will do: 2.13.0a0+git1, as NVIDIA calls its builds, counts as 2.13.0."""
    from packaging.version import InvalidVersion, Version

    try:
        return version is not None and requirement.specifier.contains(Version(version).base_version)
    except InvalidVersion:
        return False


def judge_packages(needed: Iterable[Requirement], versions: Mapping[str, str | None], about: str) -> Finding:
    """Whether every package is installed and new enough; `about` describes our own."""
    wrong = [each for each in needed if not meets(versions[each.name], each)]
    if wrong:
        shown = ", ".join(_shortfall(each, versions[each.name]) for each in wrong)
        return failure(
            PACKAGES, f"{about}: {shown}", "pip install " + " ".join(f"'{each}'" for each in wrong)
        )
    shown = ", ".join(f"{name} {versions[name]}" for name in SHOWN if versions.get(name))
    return ok(PACKAGES, f"{about}, {shown}")


def examine_packages() -> Iterator[Finding]:
    """Reads what is installed, then loads the stubs, which refuse a gRPC or protobuf that is too old."""
    needed = [each for each in needs() if each.name != TORCH]
    about = f"{OURS} {metadata.version(OURS)} (protocol {PROTOCOL}), Python {platform.python_version()}"
    yield judge_packages(needed, {each.name: _installed(each.name) for each in needed}, about)
    import hubring.protos.control_pb2_grpc
    import hubring.protos.data_pb2_grpc  # noqa: F401 - that they load is the check


def judge_torch(version: str, instructions: str, right: bool, needed: Requirement) -> Finding:
    """Whether torch is new enough, and the product of two matrices was `right`; it used `instructions`."""
    if not meets(version, needed):
        return failure(TORCH, _shortfall(needed, version), f"pip install '{needed}'")
    if not right:
        found = f"torch {version} multiplies two matrices of ones wrongly"
        return failure(TORCH, found, f"pip install --force-reinstall torch; if it stays, {_OLD_PROCESSOR}")
    return ok(TORCH, f"{version}, computes with {instructions}")


def judge_threads(threads: int, cores: float) -> Finding:
    """Whether torch has a core for each of its threads."""
    if threads <= max(1.0, cores):
        return ok(THREADS, f"{threads} on {cores:.3g} core(s)")
    return warning(
        THREADS,
        f"torch starts {threads} threads where {cores:.3g} core(s) may be used: they wait for each other",
        f"export OMP_NUM_THREADS={max(1, int(cores))} (divided by the workers on this machine)",
    )


def examine_torch(others: Sequence[Check], seconds: float) -> Iterator[Finding]:
    """Imports torch, which takes long, then runs its check and `others` in processes that have loaded it."""
    began = time.monotonic()
    import torch  # noqa: F401 - that it loads is the first check

    last = min(LAST_SECONDS, LAST_SHARE * seconds)
    left = seconds - (time.monotonic() - began) - 2 * last
    mend = f"pip install --force-reinstall torch; {_OLD_PROCESSOR} for an old processor"
    yield from isolation.examine([Check(TORCH, _compute, mend), *others], max(0.0, left), last)


def judge_settings(wrong: Mapping[str, str], contradiction: str, given: Collection[str]) -> Iterator[Finding]:
    """One finding for all settings, or one for each that is wrong, by the name of the variable or flag."""
    for name, found in wrong.items():
        yield failure(SETTINGS, found, f"correct it, or leave {name} out")
    if contradiction:
        mend = "unset one of them; or give the flag, which stands over the environment and the file"
        yield warning(SETTINGS, contradiction, mend)
    elif not wrong:
        yield ok(SETTINGS, f"{', '.join(given)}: known and allowed" if given else "no PS_* variable is set")


def examine_settings(subject: Subject) -> Iterator[Finding]:
    """Reads the environment, and the file that it or a flag names."""
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
        f"{requirement.name} {version}, at least {least} is needed" if version else f"no {requirement.name}"
    )


def _compute() -> Iterator[Finding]:
    import torch

    ones = torch.ones(SIDE, SIDE)
    right = bool((ones @ ones == SIDE).all())
    [needed] = [each for each in needs() if each.name == TORCH]
    yield judge_torch(str(torch.__version__), torch.backends.cpu.get_cpu_capability(), right, needed)
    yield judge_threads(torch.get_num_threads(), allowed_cores())


def _file_fault(file: Path | None) -> dict[str, str]:
    """What is wrong with the file by itself."""
    try:
        load_server({}, file, {})
    except ConfigError as error:
        return {"--config": str(error)}
    return {}


def _contradiction(subject: Subject) -> str:
    """What server and worker would report at their start, were the worker given some server."""
    flags = {} if "PS_SERVER" in subject.variables else {"server": subject.server or "127.0.0.1:5555"}
    try:
        load_server({}, subject.config_file, subject.variables)
        load_worker(flags, subject.config_file, subject.variables)
    except ConfigError as error:
        return str(error)
    return ""

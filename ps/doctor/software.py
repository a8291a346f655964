"""Software: installed packages, torch, and settings."""

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
PACKAGE = "hubring"
SHOWN = ("grpcio", "protobuf")
"""Packages whose versions the finding shows."""

SIDE = 64
LAST_SHARE = 0.1
"""Share of a check's seconds to wait for killed checks to end; reserved twice, once for each level."""

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
        return failure(
            PACKAGES, f"{about}: {shown}", "pip install " + " ".join(f"'{each}'" for each in wrong)
        )
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


def examine_torch(others: Sequence[Check], seconds: float) -> Iterator[Finding]:
    """Imports torch once, because that is slow, then runs the checks that need torch in forks."""
    began = time.monotonic()
    import torch  # noqa: F401 - the import is the first check

    last = min(LAST_SECONDS, LAST_SHARE * seconds)
    left = seconds - (time.monotonic() - began) - 2 * last
    fix = f"pip install --force-reinstall torch; {_OLD_PROCESSOR} for an old processor"
    yield from isolation.examine([Check(TORCH, _compute, fix), *others], max(0.0, left), last, whole=seconds)


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


def _compute() -> Iterator[Finding]:
    import torch

    ones = torch.ones(SIDE, SIDE)
    right = bool((ones @ ones == SIDE).all())
    [needed] = [each for each in needs() if each.name == TORCH]
    yield judge_torch(str(torch.__version__), torch.backends.cpu.get_cpu_capability(), right, needed)
    yield judge_threads(torch.get_num_threads(), allowed_cores())


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

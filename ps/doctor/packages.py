"""Packages that ours needs: installed, new enough, and at one with the stubs of the wire."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from typing import NamedTuple

from hubring.ps.core.types import PROTOCOL
from hubring.ps.doctor.finding import Finding, failure, ok

NAME = "packages"
OURS = "hubring"
TORCH = "torch"
"""Has a check of its own."""

SHOWN = ("grpcio", "protobuf")
"""Whose versions people ask for."""

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)>=(?P<least>[\d.]+)")
_NUMBERS = re.compile(r"\d+(\.\d+)*")


class Requirement(NamedTuple):
    """A package, and the oldest version that will do."""

    name: str
    least: str

    def met_by(self, version: str) -> bool:
        """Whether it will do: `2.13.0+cpu` is 2.13.0."""
        return _numbers(version) >= _numbers(self.least)

    def __str__(self) -> str:
        return f"{self.name}>={self.least}"


def requirements(lines: Iterable[str]) -> list[Requirement]:
    """Those of a package's own list that no extra asks for."""
    found = (_REQUIREMENT.match(line) for line in lines if "extra ==" not in line)
    return [Requirement(match["name"], match["least"]) for match in found if match]


def judge(needed: Iterable[Requirement], versions: Mapping[str, str | None], about: str) -> Finding:
    """Whether all is there.

    Args:
        needed: Packages.
        versions: What is installed of each, by name; None: it is not.
        about: What to say of our own.
    """
    wrong = {each: versions[each.name] for each in needed if not _will_do(each, versions[each.name])}
    if not wrong:
        shown = ", ".join(f"{name} {versions[name]}" for name in SHOWN if versions.get(name))
        return ok(NAME, f"{about}, {shown}")
    told = ", ".join(
        f"{each.name} {version}, at least {each.least} is needed" if version else f"no {each.name}"
        for each, version in wrong.items()
    )
    return failure(NAME, f"{about}: {told}", "pip install " + " ".join(f"'{each}'" for each in wrong))


def examine() -> Iterator[Finding]:
    """What is installed; then tries the stubs, which refuse a gRPC or protobuf that is too old for them."""
    needed = [each for each in needs() if each.name != TORCH]
    about = f"{OURS} {metadata.version(OURS)} (protocol {PROTOCOL}), Python {platform.python_version()}"
    yield judge(needed, {each.name: installed(each.name) for each in needed}, about)
    import hubring.protos.control_pb2_grpc
    import hubring.protos.data_pb2_grpc  # noqa: F401 - that they load is the check


def needs() -> list[Requirement]:
    """What our own package says that it needs."""
    return requirements(metadata.requires(OURS) or ())


def installed(name: str) -> str | None:
    """A package's version; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _will_do(requirement: Requirement, version: str | None) -> bool:
    return version is not None and requirement.met_by(version)


def _numbers(version: str) -> tuple[int, ...]:
    match = _NUMBERS.match(version)
    return tuple(map(int, match[0].split("."))) if match else ()

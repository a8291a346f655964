"""torch: loads, is new enough, computes, and starts no more threads than it may run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hubring.ps.doctor import isolation
from hubring.ps.doctor.cgroup import Cgroup
from hubring.ps.doctor.check import Check
from hubring.ps.doctor.finding import Finding, failure, ok, warning
from hubring.ps.doctor.isolation import LAST_SECONDS
from hubring.ps.doctor.packages import TORCH, Requirement, needs
from hubring.ps.doctor.processors import allowed

SIDE = 64
LAST_SHARE = 0.1
"""Of the check's seconds, what those that hang may take to end, and again to be waited for, once killed."""
_MEND = "pip install --force-reinstall torch; export ATEN_CPU_CAPABILITY=default for an old processor"


class Build(NamedTuple):
    """What torch tells of itself.

    Attributes:
        version: As it spells it.
        instructions: The best of the processor's that it uses, AVX512 say.
        right: Whether a product of two matrices came out right.
    """

    version: str
    instructions: str
    right: bool


def judge(build: Build, needed: Requirement) -> Finding:
    """Whether it can compute our jobs."""
    if not needed.met_by(build.version):
        found = f"torch {build.version}, at least {needed.least} is needed"
        return failure(TORCH, found, f"pip install '{needed}'")
    if not build.right:
        return failure(
            TORCH,
            f"torch {build.version} multiplies two matrices of ones wrongly",
            "pip install --force-reinstall torch; if it stays, export ATEN_CPU_CAPABILITY=default",
        )
    return ok(TORCH, f"{build.version}, computes with {build.instructions}")


def judge_threads(threads: int, cores: float) -> Finding:
    """Whether so many threads find so many cores."""
    name = "torch threads"
    if threads > max(1.0, cores):
        return warning(
            name,
            f"torch starts {threads} threads where {cores:.3g} core(s) may be used: they wait for each other",
            f"export OMP_NUM_THREADS={max(1, int(cores))} (divided by the workers on this machine)",
        )
    return ok(name, f"{threads} on {cores:.3g} core(s)")


def examine(others: Sequence[Check], seconds: float) -> Iterator[Finding]:
    """Imports torch, which takes long; then lets all look that need it, each in a process that has it.

    Args:
        others: To look beside the check of torch itself.
        seconds: That all of it may take.
    """
    began = time.monotonic()
    import torch  # noqa: F401 - that it loads is the first check

    last = min(LAST_SECONDS, LAST_SHARE * seconds)
    left = seconds - (time.monotonic() - began) - 2 * last
    yield from isolation.examine([Check(TORCH, compute, _MEND), *others], max(0.0, left), last)


def compute() -> Iterator[Finding]:
    """Multiplies."""
    import torch

    ones = torch.ones(SIDE, SIDE)
    right = bool((ones @ ones == SIDE).all())
    build = Build(str(torch.__version__), torch.backends.cpu.get_cpu_capability(), right)
    yield judge(build, next(each for each in needs() if each.name == TORCH))
    yield judge_threads(torch.get_num_threads(), allowed(Cgroup()))

"""NCCL: in torch's build, and able to add over this machine's GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hubring.ps.doctor.finding import Finding, failure, ok, skipped, warning

NAME = "NCCL"
LENGTH = 1024


class Nccl(NamedTuple):
    """What there is of it.

    Attributes:
        version: Of the one in torch's build; None: there is none.
        gpus: How many torch can use.
        trouble: What came of adding over them; empty: the sum, or nothing to add over.
    """

    version: str | None
    gpus: int
    trouble: str


def judge(nccl: Nccl) -> Finding:
    """Whether `--backend nccl` can work."""
    have = f"{nccl.version} in torch's build"
    if nccl.gpus == 0:
        about = have if nccl.version else "none in torch's build either"
        return skipped(NAME, f"torch can use no GPU here, and NCCL adds on GPUs alone ({about})")
    if nccl.version is None:
        return warning(
            NAME,
            f"torch's build has none: a ring over the {nccl.gpus} GPU(s) goes through the host's memory",
            "ps-worker --backend gloo, or a torch for Linux that is built for CUDA",
        )
    if nccl.trouble:
        return failure(
            NAME,
            f"{have} cannot add over the {nccl.gpus} GPU(s): {nccl.trouble}",
            "NCCL_DEBUG=INFO before ps-worker tells why; until then ps-worker --backend gloo",
        )
    return ok(NAME, f"{have} adds over the {nccl.gpus} GPU(s) of this machine")


def examine() -> Iterator[Finding]:
    """Adds over all GPUs."""
    import torch
    from torch import distributed

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    version = None
    if distributed.is_available() and distributed.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    yield judge(Nccl(version, gpus, _trouble(gpus) if version and gpus else ""))


def _trouble(gpus: int) -> str:
    import torch

    parts = [torch.full((LENGTH,), float(index + 1), device=f"cuda:{index}") for index in range(gpus)]
    try:
        torch.cuda.nccl.all_reduce(parts)  # type: ignore[no-untyped-call]
        wrong = [index for index, part in enumerate(parts) if not bool((part == sum(range(gpus + 1))).all())]
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return f"the sum is wrong on {', '.join(f'cuda:{index}' for index in wrong)}" if wrong else ""

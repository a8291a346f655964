"""The allreduce libraries: Gloo at the address that a ring uses, and NCCL over this machine's GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hubring.ps.config.address import is_loopback
from hubring.ps.core.errors import ConfigError
from hubring.ps.doctor.finding import Finding, failure, ok, skipped, warning
from hubring.ps.doctor.subject import LOOPBACK, Subject

if TYPE_CHECKING:
    from torch import Tensor

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

    limit = timedelta(seconds=seconds)
    store = HashStore()
    try:
        with ThreadPoolExecutor(RANKS) as threads:
            ranks = [threads.submit(_add, rank, address, store, limit) for rank in range(RANKS)]
            sums = [rank.result() for rank in ranks]
    except RuntimeError as error:
        return str(error).splitlines()[0]
    wrong = _wrong(sums)
    return f"the sum is wrong on rank {wrong[0]}" if wrong else ""


def _add(rank: int, address: str, store: Any, limit: timedelta) -> Tensor:
    import torch
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = limit
    group: Any = ProcessGroupGloo(store, rank, RANKS, options)
    part = torch.full((1 << 16,), rank + 1.0)
    group.allreduce([part]).wait()
    return part


def _nccl_trouble(gpus: int) -> str:
    import torch

    parts = [torch.full((1024,), index + 1.0, device=f"cuda:{index}") for index in range(gpus)]
    try:
        torch.cuda.nccl.all_reduce(parts)  # type: ignore[no-untyped-call]
        wrong = _wrong(parts)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return f"the sum is wrong on {', '.join(f'cuda:{index}' for index in wrong)}" if wrong else ""


def _wrong(sums: list[Tensor]) -> list[int]:
    """Returns the ranks whose sum is wrong. Rank r contributes r + 1."""
    expected = sum(range(len(sums) + 1))
    return [rank for rank, total in enumerate(sums) if not bool((total == expected).all())]

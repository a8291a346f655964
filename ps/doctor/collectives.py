"""The libraries that add over ranks: Gloo where a ring would meet, and NCCL over this machine's GPUs."""

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
NCCL_MEND = "NCCL_DEBUG=INFO before ps-worker tells why; until then ps-worker --backend gloo"
RANKS = 2
SHARE, MOST_SECONDS = 0.4, 10.0
"""How long Gloo's ranks may take: a share of the check's seconds, because torch is loaded first."""


def judge_gloo(address: str, trouble: str) -> Finding:
    """Whether a ring can work whose ranks meet at this address; `trouble` says why they could not add."""
    if not trouble:
        return ok(GLOO, f"{RANKS} ranks on {address} met and added right")
    if is_loopback(address):
        mend = "ip link set lo up; and no filter between a machine and itself: iptables -L, nft list ruleset"
    else:
        mend = f"let this machine reach itself at {address} on any TCP port: iptables -L, nft list ruleset"
    return failure(GLOO, f"{RANKS} ranks on {address} could not add: {trouble}", mend)


def examine_gloo(subject: Subject) -> Iterator[Finding]:
    """Opens a group of two ranks, on threads, as `ring_group` opens one of all workers."""
    try:
        address = subject.ring_address
    except ConfigError:  # another check reports it; without a server this machine's ranks would meet here
        address = LOOPBACK
    yield judge_gloo(address, _gloo_trouble(address, min(SHARE * subject.seconds, MOST_SECONDS)))


def judge_nccl(version: str | None, gpus: int, trouble: str) -> Finding:
    """Whether `--backend nccl` can work on torch's GPUs; `trouble` says why they could not add."""
    have = f"{version} in torch's build"
    if gpus == 0:
        about = have if version else "none in torch's build either"
        return skipped(NCCL, f"torch can use no GPU here, and NCCL adds on GPUs alone ({about})")
    if version is None:
        found = f"torch's build has none: a ring over the {gpus} GPU(s) goes through the host's memory"
        return warning(NCCL, found, "ps-worker --backend gloo, or a torch for Linux that is built for CUDA")
    if trouble:
        return failure(NCCL, f"{have} cannot add over the {gpus} GPU(s): {trouble}", NCCL_MEND)
    return ok(NCCL, f"{have} adds over the {gpus} GPU(s) of this machine")


def examine_nccl() -> Iterator[Finding]:
    """Adds over all GPUs."""
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
        return "this torch is built without it"
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit = timedelta(seconds=seconds)
    try:
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=limit)
        with ThreadPoolExecutor(RANKS) as threads:
            ranks = [threads.submit(_add, rank, address, store.port, limit) for rank in range(RANKS)]
            sums = [rank.result() for rank in ranks]
    except RuntimeError as error:
        return str(error).splitlines()[0]
    wrong = _wrong(sums)
    return f"the sum is wrong on rank {wrong[0]}" if wrong else ""


def _add(rank: int, address: str, port: int, limit: timedelta) -> Tensor:
    import torch
    from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

    store = TCPStore(address, port, is_master=False, timeout=limit)
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
    """The ranks whose sum is not that of 1, 2 and so on, one for each rank."""
    expected = sum(range(len(sums) + 1))
    return [rank for rank, total in enumerate(sums) if not bool((total == expected).all())]

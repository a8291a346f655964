"""Gloo: two ranks of this machine meet at the address that a ring would use, and add."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hubring.ps.config.address import is_loopback
from hubring.ps.core.errors import ConfigError
from hubring.ps.doctor.finding import Finding, failure, ok
from hubring.ps.doctor.subject import Subject

if TYPE_CHECKING:
    from torch import Tensor

NAME = "Gloo"
RANKS = 2
LENGTH = 1 << 16
SHARE, MOST_SECONDS = 0.4, 10.0
"""What the ranks may take: of the check's seconds, as torch is to be loaded first."""


def judge(address: str, trouble: str) -> Finding:
    """Whether a ring can work.

    Args:
        address: Where its ranks met.
        trouble: What came of adding; empty: the right sum.
    """
    if not trouble:
        return ok(NAME, f"{RANKS} ranks on {address} met and added right")
    if is_loopback(address):
        mend = "ip link set lo up; and no filter between a machine and itself: iptables -L, nft list ruleset"
    else:
        mend = f"let this machine reach itself at {address} on any TCP port: iptables -L, nft list ruleset"
    return failure(NAME, f"{RANKS} ranks on {address} could not add: {trouble}", mend)


def examine(subject: Subject) -> Iterator[Finding]:
    """Opens a group of two ranks, on threads, as `ring_group` opens one of all workers."""
    try:
        address = subject.ring_address
    except ConfigError:  # which another check tells; alone, this machine's ranks would meet here
        address = "127.0.0.1"
    yield judge(address, _trouble(address, min(SHARE * subject.seconds, MOST_SECONDS)))


def _trouble(address: str, seconds: float) -> str:
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
    expected = RANKS * (RANKS + 1) / 2
    wrong = [rank for rank, total in enumerate(sums) if not bool((total == expected).all())]
    return f"the sum is wrong on rank {wrong[0]}" if wrong else ""


def _add(rank: int, address: str, port: int, limit: timedelta) -> Tensor:
    import torch
    from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

    store = TCPStore(address, port, is_master=False, timeout=limit)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = limit
    group: Any = ProcessGroupGloo(store, rank, RANKS, options)
    part = torch.full((LENGTH,), rank + 1.0)
    group.allreduce([part]).wait()
    return part

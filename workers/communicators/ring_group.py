"""How the ranks of a ring find each other: a store on rank 0, then a process group.

Groups are opened directly rather than through `init_process_group`, which allows
one a process and would take the script's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from hubring.ps.core.errors import ConfigError, RingBroken
from hubring.ps.transport.host import towards


def ring_store(
    rank: int,
    host: str,
    publish: Callable[[str], None],
    lookup: Callable[[], str],
    timeout: float,
) -> TCPStore:
    """Opens rank 0's store on a free port and connects the others to it.

    Args:
        rank: This process's.
        host: Rank 0's address as the other ranks reach it; only rank 0's counts.
        publish: Tells the others `host:port`; called on rank 0.
        lookup: Returns what rank 0 published, waiting for it; called on the others.
        timeout: Seconds that connecting may take.

    Raises:
        RingBroken: The store does not answer.
    """
    limit = timedelta(seconds=timeout)
    try:
        if rank == 0:
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
            publish(f"{host}:{store.port}")
            return store
        host, _, port = lookup().rpartition(":")
        return TCPStore(host, int(port), is_master=False, timeout=limit)
    except RuntimeError as cause:
        raise RingBroken(
            f"rank {rank} could not reach the ring's meeting point at {host}: {gist(cause)}; "
            "rank 0's host must be reachable from here, on any port"
        ) from cause


def gist(cause: RuntimeError) -> str:
    """What torch's error says, without the place in its sources, the advice and the stack."""
    first = str(cause).split("\n")[0].split(" This is typically")[0]
    return re.sub(r"^\[\S+:\d+\] ", "", first).rstrip(". ")


def open_group(
    rank: int,
    size: int,
    store: Store,
    backend: str,
    device: torch.device,
    host: str | None,
    timeout: float,
) -> Any:
    """Opens the process group of all ranks; the arguments are `Ring`'s.

    Raises:
        ConfigError: The backend does not exist here, or does not fit the device.
        RingBroken: The ranks did not find each other.
    """
    try:
        if backend == "gloo":
            options = _gloo_options(host or own_address(store), timeout)
            group: Any = dist.ProcessGroupGloo(store, rank, size, options)
            # Who is connected to all may leave at once, and others are still connecting to each other.
            group.barrier().wait()
            return group
        if backend == "nccl":
            return _open_nccl(rank, size, store, device, timeout)
    except RuntimeError as cause:
        raise RingBroken(
            f"rank {rank} of {size} did not find the other ranks within {timeout:g} s: {gist(cause)}"
        ) from cause
    raise ConfigError(f"the ring's backend is {backend!r}; allowed: gloo, nccl")


def _gloo_options(host: str, timeout: float) -> Any:
    # Gloo's own choice is the address of the host's name, which on many systems is a loopback one.
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout)
    return options


def _open_nccl(rank: int, size: int, store: Store, device: torch.device, timeout: float) -> Any:
    if not dist.is_nccl_available():
        raise ConfigError("backend nccl: this torch was built without it; use gloo")
    if device.type != "cuda":
        raise ConfigError(f"backend nccl reduces on a GPU, but the device is {device}; use gloo")
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def own_address(store: Store) -> str:
    """The address from which this host reaches the store's; the ranks meet on the same network.

    Raises:
        ConfigError: It is no store that has an address.
    """
    if not isinstance(store, TCPStore):
        raise ConfigError("a store that is no TCPStore says nothing of the network: give the host's address")
    return towards(store.host)

"""Connects the ranks of a ring: a store on rank 0, then a process group.

Groups are made directly, not with `init_process_group`. That function allows one default
group per process, which the script may need.
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
from hubring.workers.communicators.ring.connections import GroupConnections


def ring_store(
    rank: int,
    host: str,
    publish: Callable[[str], None],
    lookup: Callable[[], str],
    timeout: float,
) -> TCPStore:
    """Opens rank 0's store on a free port and connects the other ranks to it.

    Args:
        rank: This process's rank.
        host: Rank 0's address for the other ranks. Only rank 0 uses it.
        publish: Publishes `host:port`. Called on rank 0.
        lookup: Waits for the published address and returns it. Called on the other ranks.
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
            f"rank {rank} could not reach the ring's store on {host}: {gist(cause)};"
            " rank 0's host must be reachable from this host on any port"
        ) from cause


def gist(cause: RuntimeError) -> str:
    """Returns the message of a torch error without source location, advice and stack."""
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
    connections: GroupConnections | None = None,
) -> Any:
    """Opens the process group of all ranks. See `Ring` for the arguments; `connections` can cut Gloo's.

    Raises:
        ConfigError: The backend is not available, or does not support the device.
        RingBroken: The ranks could not connect to each other.
    """
    try:
        if backend == "gloo":
            if connections is None:
                # By default Gloo uses the address of the host name, on many systems a loopback address.
                made = dist.ProcessGroupGloo.create_device(hostname=host or own_address(store))
            else:
                connections.introduce(store, rank, size)
                made = connections.device
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [made]
            options._timeout = timedelta(seconds=timeout)
            group: Any = dist.ProcessGroupGloo(store, rank, size, options)
            # Without a barrier, a connected rank could leave while other ranks still connect.
            group.barrier().wait()
            return group
        if backend == "nccl":
            return _open_nccl(rank, size, store, device, timeout)
    except RuntimeError as cause:
        raise RingBroken(
            f"rank {rank} of {size} could not connect to the other ranks within {timeout:g} s (--timeout):"
            f" {gist(cause)}"
        ) from cause
    raise ConfigError(f"the ring's backend is {backend!r}; use gloo or nccl")


def _open_nccl(rank: int, size: int, store: Store, device: torch.device, timeout: float) -> Any:
    if not dist.is_nccl_available():
        raise ConfigError("backend nccl: this torch was built without NCCL; use gloo")
    if device.type != "cuda":
        raise ConfigError(f"backend nccl needs a GPU, but the device is {device}; use gloo")
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def own_address(store: Store) -> str:
    """Returns this host's address on the network of the store.

    Raises:
        ConfigError: The store is not a TCPStore.
    """
    if not isinstance(store, TCPStore):
        raise ConfigError(
            f"cannot find this host's address from a {type(store).__name__}: pass host=..., or use a TCPStore"
        )
    return towards(store.host)

"""Connects the ranks of a ring: a store in which they find each other, then a process group.

Groups are made directly, not with `init_process_group`. That function allows one default
group per process, which the script may need.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from hubring.ps.core.errors import ConfigError, DeadlineExceeded, RingBroken
from hubring.ps.core.work import Work
from hubring.workers.communicators.ring.connections import GroupConnections
from hubring.workers.communicators.ring.nccl import groups


class Notes(Protocol):
    """What the workers of a job publish for each other; `hubring.ps.client.board.Board`."""

    def publish(self, key: str, value: str) -> None: ...

    def look_around(self, key: str, timeout: float, generation: int = 0) -> Mapping[str, str]: ...

    def forget(self, folder: str) -> None: ...


class RingStore(Store):
    """The store through which the ranks of one group connect. What they set is on the job's own server.

    torch calls it from C++, and only while this object lives: keep a reference as long as the group.

    Args:
        notes: What the workers publish.
        folder: Begins the group's keys. All ranks give the same.
        timeout: Seconds that one wait may take, unless torch gives a limit.
        generation: The generation of a ring that heals; 0 for none.
    """

    def __init__(self, notes: Notes, folder: str, timeout: float, generation: int = 0) -> None:
        super().__init__()
        self._notes, self._folder = notes, folder
        self._timeout, self._generation = timeout, generation
        self._known: dict[str, str] = {}

    def within(self, name: str) -> RingStore:
        """Returns the store of another group."""
        return RingStore(self._notes, f"{self._folder}.{name}", self._timeout, self._generation)

    def forget(self) -> None:
        """Removes what the ranks have set. Call it once all have connected, on one rank."""
        self._notes.forget(self._folder)

    # What torch calls.

    def set(self, key: str, value: bytes | str) -> None:
        text = b64encode(value if isinstance(value, bytes) else value.encode()).decode()
        self._notes.publish(f"{self._folder}/{key}", text)
        self._known[f"{self._folder}/{key}"] = text

    def get(self, key: str) -> bytes:
        self._find(key, self._timeout)
        return b64decode(self._known[f"{self._folder}/{key}"])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._find(key, self._timeout if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether this rank has met the keys. A thread of NCCL's asks every second for a signal."""
        return all(f"{self._folder}/{key}" in self._known for key in keys)

    def clone(self) -> RingStore:
        """Returns this store: any thread may call it."""
        return self

    def _find(self, key: str, timeout: float) -> None:
        full = f"{self._folder}/{key}"
        if full in self._known:
            return
        try:
            self._known.update(self._notes.look_around(full, timeout, self._generation))
        except DeadlineExceeded as error:  # the last part of a key is the rank that sets it
            text = f"rank {key.rpartition('/')[2]} did not publish where it listens"
            raise DeadlineExceeded(text) from error


def gist(cause: Exception) -> str:
    """Returns the message of a torch error without source location, advice and stack."""
    first = str(cause).split("\n")[0].split(" This is typically")[0]
    return re.sub(r"^\[\S+:\d+\] ", "", first).rstrip(". ")


def open_group(
    rank: int,
    size: int,
    store: Store,
    backend: str,
    device: torch.device,
    host: str,
    timeout: float,
    connections: GroupConnections | None = None,
    watch: Work | None = None,
) -> Any:
    """Opens the process group of all ranks. See `Ring` for the arguments.

    `connections` can cut Gloo's. With `watch`, which fails when a member is lost, NCCL connects now.

    Raises:
        ConfigError: The backend is not available, or does not support the device.
        RingBroken: The ranks could not connect to each other.
        HubringError: The job has failed meanwhile.
    """
    try:
        if backend == "gloo":
            if connections is None:
                # By default Gloo uses the address of the host name, on many systems a loopback address.
                made = dist.ProcessGroupGloo.create_device(hostname=host)
            else:
                connections.introduce(store, rank, size)
                made = connections.device
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [made]
            options._timeout = timedelta(seconds=timeout)
            group: Any = dist.ProcessGroupGloo(store, rank, size, options)
            # Without a barrier, a connected rank could leave while other ranks still connect.
            group.barrier().wait()
            if rank == 0 and isinstance(store, RingStore):
                store.forget()
            return group
        if backend == "nccl":
            group = groups.open_nccl(rank, size, store, device, timeout)
            if watch is not None:
                groups.connect(group, store, device, timeout, watch)
                if rank == 0 and isinstance(store, RingStore):
                    store.forget()
            return group
    except (RuntimeError, DeadlineExceeded) as cause:
        raise RingBroken(
            f"rank {rank} of {size} could not connect to the other ranks within {timeout:g} s (--timeout):"
            f" {gist(cause)}"
        ) from cause
    raise ConfigError(f"the ring's backend is {backend!r}; use gloo or nccl")

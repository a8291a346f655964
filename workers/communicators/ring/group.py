"""Connects the ranks of a ring: a store in which they find each other, then a process group.

A Gloo group that must end has its sockets shut down (`GroupConnections`), here and thereby on the other
members: Gloo has no call that ends a pending operation, and it ends one within milliseconds if its connection
closes.

Groups are made directly, not with `init_process_group`. That function allows one default
group per process, which the script may need.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from hubring.ps.client.rendezvous import Board
from hubring.ps.core.errors import ConfigError, DeadlineExceeded, RingBroken
from hubring.ps.core.torch_internals import gloo_group, nccl_group
from hubring.ps.core.work import Work
from hubring.ps.job.generations import MEETING

_END = "."
"""Ends each published text, since the server takes an empty one for none. Decoding leaves it out."""


class RingStore(Store):
    """The store through which the ranks of one group connect. What they set is on the job's own server.

    torch calls it from C++, and only while this object lives: keep a reference as long as the group.

    Args:
        board: Where the workers publish.
        folder: Begins the group's keys. All ranks give the same.
        timeout: Seconds that one wait may take, unless torch gives a limit.
        generation: The generation of a ring that heals; 0 for none.
    """

    def __init__(self, board: Board, folder: str, timeout: float, generation: int = 0) -> None:
        super().__init__()
        self._board, self._folder = board, folder
        self._timeout, self.generation = timeout, generation
        self._known: dict[str, str] = {}

    def within(self, name: str) -> RingStore:
        """Returns the store of another group."""
        return RingStore(self._board, f"{self._folder}.{name}", self._timeout, self.generation)

    def gather(self, name: str, rank: int, own: bytes, ranks: Iterable[int]) -> list[bytes]:
        """Returns what these ranks pass, in their order. All of them call it."""
        self.set(f"{name}/{rank}", own)
        return [self.get(f"{name}/{other}") for other in ranks]

    def meet(self, rank: int, size: int) -> None:
        """Waits until all ranks have called it.

        Args:
            rank: This rank.
            size: Number of ranks.

        Raises:
            DeadlineExceeded: A rank did not call it in time.
            RingBroken: A rank has finished without it.
        """
        place = RingStore(self._board, MEETING, self._timeout)
        place.set(str(rank), b"")
        for other in range(size):
            try:
                place.get(str(other))
            except DeadlineExceeded as error:
                late = f"rank {other} did not come to the first exchange in {self._timeout:g} s (--timeout)"
                raise DeadlineExceeded(late) from error

    def forget(self) -> None:
        """Removes what the ranks have set. Call it once all have connected, on one rank."""
        self._board.forget(self._folder)

    # What torch calls.

    def set(self, key: str, value: bytes | str) -> None:
        text = b64encode(value if isinstance(value, bytes) else value.encode()).decode() + _END
        self._board.publish(f"{self._folder}/{key}", text)
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
            self._known.update(self._board.look_around(full, timeout, self.generation))
        except DeadlineExceeded as error:  # the last part of a key is the rank that sets it
            text = f"rank {key.rpartition('/')[2]} did not publish where it listens"
            raise DeadlineExceeded(text) from error


def gist(cause: Exception) -> str:
    """Returns the message of an operation's error without source location, advice and stack."""
    first = str(cause).split("\n")[0].split(" This is typically")[0]
    return re.sub(r"^\[\S+:\d+\] ", "", first).rstrip(". ").removesuffix(". Restart the job")


ATTEMPTS = 10
"""How often a device is made until no other thread opens a listener meanwhile."""

Address = tuple[Any, ...]

_opening = threading.Lock()
"""Held while a device is made, so that its port can be distinguished from those of other rings."""


class GroupConnections:
    """The connections of one member.

    Args:
        host: This member's address for the others.

    Attributes:
        device: Gloo's device, for the group's options.
    """

    def __init__(self, host: str) -> None:
        self._own, self.device = _listening_device(host)
        self._others: set[Address] = set()

    def introduce(self, store: Store, rank: int, ranks: Iterable[int]) -> None:
        """Exchanges the listeners' addresses with the other members, before the group connects."""
        host, port = self._own[:2]
        store.set(f"listener/{rank}", f"{host} {port}")
        for other in ranks:
            name, number = store.get(f"listener/{other}").decode().split()
            if other != rank:
                self._others.add((name, int(number)))

    def cut(self) -> None:
        """Shuts all connections down. Pending and later operations of the group then fail on all members."""
        for one in _sockets():
            with closing(one), suppress(OSError):
                peer = one.getpeername()[:2]  # the listener has none; Gloo would end the process without it
                if one.getsockname()[:2] == self._own[:2] or peer in self._others:
                    one.shutdown(socket.SHUT_RDWR)


def _listening_device(host: str) -> tuple[Address, Any]:
    own = {place[0] for *_, place in socket.getaddrinfo(host, None)}
    for _ in range(ATTEMPTS):
        with _opening:
            before = set(_listeners())
            device = dist.ProcessGroupGloo.create_device(hostname=host)
            made = [one for one in set(_listeners()) - before if one[0] in own]
        if len(made) == 1:
            return made[0], device
    raise RingBroken(f"cannot find the port on which Gloo listens at {host}; other threads open ports")


def _listeners() -> Iterator[Address]:
    for one in _sockets():
        with closing(one):
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield one.getsockname()


def _sockets() -> Iterator[socket.socket]:
    """Yields a duplicate of each TCP socket of this process."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                one = socket.socket(fileno=os.dup(int(name)))
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    yield one
                else:
                    one.close()


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
    with connecting(rank, size, timeout):
        if backend == "gloo":
            if connections is None:
                # By default Gloo uses the address of the host name, on many systems a loopback address.
                made = dist.ProcessGroupGloo.create_device(hostname=host)
            else:
                connections.introduce(store, rank, range(size))
                made = connections.device
            group: Any = gloo_group(store, rank, size, made, timeout)
            # Without a barrier, a connected rank could leave while other ranks still connect.
            group.barrier().wait()
        elif backend == "nccl":
            group = open_nccl(rank, size, store, device, timeout)
            if watch is None:
                return group  # it connects later
            connect_nccl(group, store, device, timeout, watch)
        else:
            raise ConfigError(f"the ring's backend is {backend!r}; use shm, gloo or nccl")
        if rank == 0 and isinstance(store, RingStore):
            store.forget()
    return group


@contextmanager
def connecting(rank: int, size: int, timeout: float) -> Iterator[None]:
    """Translates the errors of a group that the ranks could not open."""
    try:
        yield
    except (RuntimeError, DeadlineExceeded) as cause:
        raise RingBroken(
            f"rank {rank} of {size} could not connect to the other ranks within {timeout:g} s (--timeout):"
            f" {gist(cause)}"
        ) from cause


def open_nccl(rank: int, size: int, store: Store, device: torch.device, timeout: float) -> Any:
    """Opens a group that connects in its first operation.

    Raises:
        ConfigError: torch has no NCCL, or the device is no GPU.
    """
    if not dist.is_nccl_available():
        raise ConfigError("backend nccl: this torch was built without NCCL; use gloo")
    if device.type != "cuda":
        raise ConfigError(f"backend nccl needs a GPU, but the device is {device}; use gloo")
    torch.cuda.set_device(device)
    return nccl_group(store, rank, size, timeout)


def connect_nccl(group: Any, store: Store, device: torch.device, timeout: float, watch: Work) -> None:
    """Connects a group. NCCL itself waits without limit for a member that is lost.

    Args:
        group: The group.
        store: Its store, which must live as long as NCCL uses it.
        device: The GPU.
        timeout: Seconds.
        watch: Fails when a member is lost.

    Raises:
        RingBroken: NCCL has failed, or a member is lost.
        DeadlineExceeded: A member did not connect in time.
    """
    connected = Work("connecting over NCCL")
    watch.when_done(lambda ended: connected.fail(ended.error) if ended.error is not None else None)

    def first_operation(_: Store) -> None:
        torch.cuda.set_device(device)
        try:
            group.allreduce(
                [torch.zeros(1, dtype=torch.float32, device=device)]
            ).wait()  # torch does not keep the tensor
        except RuntimeError as cause:
            connected.fail(RingBroken(str(cause)))
        else:
            connected.complete_part()
        if connected.error is not None:  # the caller has given up
            group.abort()

    threading.Thread(target=first_operation, args=(store,), name="connecting over NCCL", daemon=True).start()
    try:
        connected.wait(timeout)
    except DeadlineExceeded as error:
        connected.fail(error)
        if connected.error is not None:  # otherwise it has connected just now
            raise

"""A torch.distributed process group whose operations are Works, and how it comes about.

The law: the first failure ends the ring. Every pending operation fails with it,
and every later one at once, so that nobody waits for a rank that is gone.

Gloo notices a peer whose connection closed, within milliseconds. It does not
notice one that is merely stopped or cut off, and cannot be made to give up: then
whoever watches the ranks calls `fail`, and the process has to exit without
destroying the group, which would wait for the operation under way.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ps.errors import ConfigError, HubringError, RingBroken
from ps.work import Work

Launch = Callable[[Any], Any]
"""Starts one operation on a process group and returns torch's handle of it."""


class RingWork(Work):
    """An operation of the ring.

    On the CPU `then` runs in the group's thread, so that it hides behind backward
    as the operation does. On CUDA an operation is over once its stream has it
    queued: the waiter's stream is put behind it and `then` is queued there.
    """

    def __init__(self, what: str, then: Callable[[], object] | None = None) -> None:
        super().__init__(what)
        self.then = then
        self.handle: Any = None

    def wait(self, timeout: float | None = None) -> None:
        super().wait(timeout)
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.wait()
            self.run_then()

    def run_then(self) -> None:
        then, self.then = self.then, None
        if then is not None:
            then()


class Ring:
    """All ranks' process group.

    Args:
        rank: This process's.
        size: How many there are.
        store: Where ranks find each other; `ring_store` makes one.
        backend: `gloo` or `nccl`.
        device: Where the tensors live that are reduced.
        host: This process's address as the other ranks reach it; None finds it by the store.
        timeout: Seconds that one operation, and the first meeting, may take.

    Attributes:
        lost: Ranks known to be gone; whoever learns of one adds it, and errors name it.

    Raises:
        ConfigError: The backend does not exist here, or does not fit the device.
        RingBroken: The ranks did not find each other.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: dist.Store,
        *,
        backend: str,
        device: torch.device,
        host: str | None,
        timeout: float,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.timeout = timeout
        self.lost: set[int] = set()
        self._lock = threading.Lock()
        self._pending: set[Work] = set()
        self._failure: HubringError | None = None
        self._group = _open_group(rank, size, store, backend, device, host, timeout)

    def start(self, work: RingWork, launch: Launch) -> None:
        """Starts an operation, of which `work` will tell. All ranks start the same ones in the same order."""
        with self._lock:
            failure = self._failure
            if failure is None:
                self._pending.add(work)
        if failure is not None:
            work.fail(failure)
            return
        try:
            handle = launch(self._group)
        except RuntimeError as cause:
            self.fail(self._broken_in(work.what, cause))
            return
        if self.device.type == "cuda":
            work.handle = handle
        handle.get_future().add_done_callback(partial(self._ended, work))

    def run(self, what: str, launch: Launch) -> None:
        """Starts an operation and waits for it."""
        work = RingWork(what)
        self.start(work, launch)
        work.wait(self.timeout)

    def gather(self, what: str, data: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's flat uint8 tensor in rank order, of any length each."""
        length = torch.tensor([data.numel()], device=self.device)
        lengths = [int(one.item()) for one in self._gather_equal(what, length)]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self.device)
        padded[: data.numel()] = data
        if not padded.numel():
            return [padded] * self.size
        return [one[:length] for one, length in zip(self._gather_equal(what, padded), lengths, strict=True)]

    def fail(self, error: HubringError) -> None:
        """Ends the ring from any thread: `error` is what every pending and later operation fails with."""
        with self._lock:
            self._failure = self._failure or error
            pending, self._pending = self._pending, set()
        for work in pending:
            work.fail(self._failure)

    def close(self) -> None:
        """Gives the connections back; a ring that failed keeps them until the process exits."""
        if self._failure is None:
            self.fail(RingBroken("this worker has left the ring"))
            self._group.shutdown()

    def _gather_equal(self, what: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self.run(what, lambda group: group.allgather([parts], [tensor]))
        return parts

    def _ended(self, work: RingWork, future: torch.futures.Future[Any]) -> None:
        """Called in the group's thread when an operation is over, one way or the other."""
        try:
            future.value()
            if work.handle is None:
                work.run_then()
        except RuntimeError as cause:
            self.fail(self._broken_in(work.what, cause))
            return
        with self._lock:
            self._pending.discard(work)
        work.complete_part()

    def _broken_in(self, what: str, cause: RuntimeError) -> RingBroken:
        known = (
            f"rank {', '.join(map(str, sorted(self.lost)))}" if self.lost else "which one is not known yet"
        )
        reason = str(cause).splitlines()[0]
        return RingBroken(
            f"rank {self.rank}: {what} failed, a member of the ring is gone ({known}): {reason}; "
            "start the job again"
        )


def ring_store(
    rank: int,
    host: str,
    publish: Callable[[str], None],
    lookup: Callable[[], str],
    timeout: float,
) -> dist.TCPStore:
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
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
            publish(f"{host}:{store.port}")
            return store
        host, _, port = lookup().rpartition(":")
        return dist.TCPStore(host, int(port), is_master=False, timeout=limit)
    except RuntimeError as cause:
        raise RingBroken(
            f"rank {rank} could not reach the ring's meeting point at {host}: {str(cause).splitlines()[0]}; "
            "rank 0's host must be reachable from here, on any port"
        ) from cause


def _open_group(
    rank: int,
    size: int,
    store: dist.Store,
    backend: str,
    device: torch.device,
    host: str | None,
    timeout: float,
) -> Any:
    try:
        if backend == "gloo":
            return dist.ProcessGroupGloo(
                store, rank, size, _gloo_options(host or _own_address(store), timeout)
            )
        if backend == "nccl":
            return _open_nccl(rank, size, store, device, timeout)
    except RuntimeError as cause:
        raise RingBroken(
            f"rank {rank} of {size} did not find the other ranks within {timeout:g} s: "
            f"{str(cause).splitlines()[0]}"
        ) from cause
    raise ConfigError(f"the ring's backend is {backend!r}; allowed: gloo, nccl")


def _gloo_options(host: str, timeout: float) -> Any:
    # Gloo's own choice is the address of the host's name, which on many systems is a loopback one.
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout)
    return options


def _open_nccl(rank: int, size: int, store: dist.Store, device: torch.device, timeout: float) -> Any:
    if not dist.is_nccl_available():
        raise ConfigError("backend nccl: this torch was built without it; use gloo")
    if device.type != "cuda":
        raise ConfigError(f"backend nccl reduces on a GPU, but the device is {device}; use gloo")
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _own_address(store: dist.Store) -> str:
    """The address from which this host reaches the store's; the ranks meet on the same network."""
    if not isinstance(store, dist.TCPStore):
        raise ConfigError("a store that is no TCPStore says nothing of the network: give the host's address")
    family, kind, _, _, place = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # a datagram socket sends nothing by it
        return str(probe.getsockname()[0])

"""A torch.distributed process group whose operations are Works.

The law: the first failure ends the ring. Every pending operation fails with it,
and every later one at once, so that nobody waits for a rank that is gone.

Gloo notices a peer whose connection closed, within milliseconds. It does not
notice one that is merely stopped or cut off, and cannot be made to give up: then
whoever watches the ranks calls `fail`, and the process has to exit without
destroying the group, which would wait for the operation under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from ps.errors import HubringError, RingBroken
from ps.work import Work
from workers.ring_group import gist, open_group

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
        store: Where ranks find each other; `ring_group.ring_store` makes one.
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
        store: Store,
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
        self._group = open_group(rank, size, store, backend, device, host, timeout)

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
        return RingBroken(
            f"rank {self.rank}: {what} failed, a member of the ring is gone ({known}): {gist(cause)}; "
            "start the job again"
        )

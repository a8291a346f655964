"""A torch.distributed process group whose operations are Works.

Gloo notices within milliseconds that a peer's connection is closed. It does not notice a peer
that is stopped or unreachable, and an operation cannot be cancelled. Then the code that watches
the ranks calls `fail`. A failed group is never destroyed: destroying it waits for the pending
operation or aborts the process, even at exit.

The memory of one host has the same place as Gloo (`hubring.workers.communicators.ring.host_group`). It also
notices that a process ended, and its operations can be ended.

NCCL's operations wait without end for a lost member. When they are aborted they end as if they were complete,
and the last signals of an aborted operation can also end those of other members, with wrong sums. So each
member keeps a receive over Gloo pending, which fails when its neighbor's connection closes, and an operation
counts once all members have reported over Gloo that theirs has ended. See `Witness`.
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from hubring.ps.core.errors import ConfigError, DeadlineExceeded, HubringError, RingBroken
from hubring.ps.core.work import Work
from hubring.workers.communicators.host.marks import tensor_over
from hubring.workers.communicators.ring.group import GroupConnections, RingStore, gist, open_group
from hubring.workers.communicators.ring.host_group import HostGroup, open_host_group
from hubring.workers.communicators.ring.two_levels import TwoLevels
from hubring.workers.communicators.ring.work import ConfirmedWait, Operations, RingWork

log = logging.getLogger(__name__)

T = TypeVar("T")

Launch = Callable[[Any], Any]
"""Starts one operation on a process group and returns torch's handle."""

FOREVER = timedelta(days=3650)
"""Longer than any job."""

ABORT_SECONDS = 10.0
"""How long operations may take to notice that their connections are cut; a group that does not is left."""

_CPU = torch.device("cpu")

FIRST_BYTES = 504
"""Bytes of a gathered tensor that are sent together with its length."""

_WORD = 8
"""Bytes of the length itself."""

_python = ctypes.PyDLL(None)
_python.Py_IncRef.argtypes = _python.Py_DecRef.argtypes = [ctypes.py_object]
_python.Py_IncRef.restype = _python.Py_DecRef.restype = None


class Ring:
    """The process group of a ring.

    Args:
        rank: This process's rank.
        size: Number of ranks.
        store: The store through which ranks connect.
        backend: `shm`, `gloo` or `nccl`; None: `shm` if all ranks are on one host, else `gloo`.
        device: Device of the tensors.
        host: This process's address for the other ranks.
        timeout: Seconds that connecting, and each operation, may take.
        patient: Whether operations have no timeout. Connecting still has one.
        connect_timeout: Seconds that connecting may take; None: `timeout`.
        abortable: Whether `abort` may be called; with `nccl` it needs a witness.
        witness: Notices lost members for a ring over NCCL, which aborts it in the end. Operations are then
            done once they have ended on all members, also on a GPU.
        group: The process group, if it is open already.

    Attributes:
        backend: `shm`, `gloo` or `nccl`.
        on_host: The process group of `shm`.
        hosts: Number of hosts whose ranks reduce among themselves first; 0: there are none.
        exchangers: Number of ranks that sum over the network; 1 on a rank that does not.
        received: How many ranks' tensors this one receives over the network in a gather.

    Raises:
        ConfigError: The backend is not available, or does not support the device.
        RingBroken: The ranks could not connect to each other.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store | None = None,
        *,
        backend: str | None = None,
        device: torch.device = _CPU,
        host: str = "",
        timeout: float = 0.0,
        patient: bool = False,
        connect_timeout: float | None = None,
        abortable: bool = False,
        witness: Witness | None = None,
        group: HostGroup | TwoLevels | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.timeout = None if patient else timeout
        limit = connect_timeout or timeout
        assert store is not None or group is not None
        if isinstance(store, RingStore) and group is None and backend in (None, "shm"):
            group = open_host_group(rank, size, store, limit)
        self.on_host = group if isinstance(group, HostGroup) else None
        if backend == "shm" and self.on_host is None:
            raise ConfigError(
                "backend shm: the members of the ring are not on one host, or not one user's; use gloo"
            )
        self.backend = "shm" if self.on_host is not None else backend or "gloo"
        cuts = abortable and group is None and self.backend == "gloo"
        self._connections = GroupConnections(host) if cuts else None
        self._witness = witness
        watch = witness.watch if witness is not None else None
        # Half of the time: the ring heals before callers give up.
        wait = RingWork.settle if witness is None else ConfirmedWait(device, witness.confirm, timeout / 2)
        self._group: Any = group
        if store is not None and group is None:
            self._group = open_group(
                rank, size, store, self.backend, device, host, limit, self._connections, watch
            )
        self.operations = Operations(rank, wait)  # its thread would stay if the ranks could not connect
        if watch is not None:
            watch.when_done(lambda ended: self.fail(RingBroken(str(ended.error))) if ended.error else None)
        if patient or connect_timeout is not None or group is not None:
            self._group.set_timeout(FOREVER if patient else timedelta(seconds=timeout))
        self.hosts, self.exchangers, self.received = 0, size, size - 1
        if isinstance(group, TwoLevels):
            self.hosts, self.exchangers, self.received = group.counts
        self._store = store
        self._exchanges, self._exchange_ended = 0, threading.Condition()
        """How many calls of `exchange` wait for torch."""
        for kept in () if self.on_host else (self._group, store):  # never destroyed, unless by `_release`
            _python.Py_IncRef(kept)

    def start(self, work: RingWork, launch: Launch) -> None:
        """Starts the operation of `work`. All ranks must start the same operations in the same order."""
        if not self.operations.begin(work):
            return
        try:
            handle = launch(self._group)
        except RuntimeError as cause:
            self.operations.break_in(work, cause)
            return
        if self.device.type == "cuda" and self._witness is None:
            self.operations.queued(work, handle)
        else:
            self.operations.follow(work, handle)

    def run(self, what: str, launch: Launch) -> None:
        """Starts an operation and waits for it."""
        if self.on_host is not None and not self.operations.pending:
            self._run_here(what, launch(self.on_host).wait)
            return
        work = RingWork(what)
        self.start(work, launch)
        work.wait(self.timeout)

    def _run_here(self, what: str, run: Callable[[], T]) -> T:
        """Runs an operation in this thread, without which no operation waits."""
        work = RingWork(what)
        if self.operations.begin(work):
            try:
                result = run()
            except (RuntimeError, RingBroken, DeadlineExceeded) as cause:
                self.operations.break_in(work, cause)
            else:
                self.operations.end(work)
                return result
        work.wait()
        raise AssertionError("the work has failed")

    def exchange(self, whose: Work, launch: Launch) -> None:
        """Starts an operation and waits for it in this thread, so that it does not delay other operations.

        If the ring fails meanwhile, `whose` fails, and this call may never return.
        """
        work = RingWork(whose.what)
        work.when_done(lambda ended: whose.fail(ended.error) if ended.error is not None else None)
        with self._exchange_ended:
            group, begun = self._group, self.operations.begin(work)
            self._exchanges += begun
        if begun:
            try:
                launch(group).wait(FOREVER)
            except RuntimeError as cause:
                self.operations.break_in(work, cause)
            else:
                self.operations.end(work)
            finally:
                with self._exchange_ended:
                    self._exchanges -= 1
                    self._exchange_ended.notify_all()
        work.wait()

    def gather(
        self, what: str, data: torch.Tensor, lengths: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Returns every rank's flat uint8 tensor in rank order. Lengths may differ.

        Without `lengths`, the first operation gathers each length with the first bytes of the tensor.
        A second operation gathers the remaining bytes, if there are any.
        """
        if self.on_host is not None and lengths is None and not self.operations.pending:
            gathered = self.gather_on_host(what, data.numpy().data)
            assert gathered is not None
            return [tensor_over(one).clone() for one in gathered]  # the next operation uses their memory
        if lengths is not None:
            return self._gather_padded(what, data, lengths)
        first = torch.zeros(_WORD + FIRST_BYTES, dtype=torch.uint8, device=self.device)
        first[:_WORD] = torch.tensor([data.numel()], device="cpu").view(torch.uint8)
        first[_WORD : _WORD + data.numel()] = data[:FIRST_BYTES]
        firsts = self._gather_equal(what, first)
        lengths = [int(one[:_WORD].clone().view(torch.int64).item()) for one in firsts]
        heads = [one[_WORD : _WORD + length] for one, length in zip(firsts, lengths, strict=True)]
        left = [max(0, length - FIRST_BYTES) for length in lengths]
        if not any(left):
            return heads
        tails = self._gather_padded(what, data[FIRST_BYTES:], left)
        return [torch.cat([head, tail]) for head, tail in zip(heads, tails, strict=True)]

    def gather_on_host(
        self, what: str, data: memoryview | None, until: float = math.inf
    ) -> list[memoryview] | None:
        """As `gather`, of bytes on one host. They are valid until the next operation.

        Args:
            what: What the operation is for.
            data: This rank's bytes; None to go on with a gather that has begun.
            until: By `time.monotonic`. Returns None if a member has not come by then. Call it again before
                any other operation.
        """
        group = self.on_host
        assert group is not None

        def gather() -> list[memoryview] | None:
            if data is not None:
                group.begin_gather(data)
            return group.end_gather(until)

        return self._run_here(what, gather)

    def fail(self, error: HubringError) -> None:
        """Fails all current and later operations. Safe to call from any thread."""
        self.operations.fail(error)
        if isinstance(group := self._group, HostGroup | TwoLevels):
            group.fail(str(error))

    def abort(self, error: HubringError) -> None:
        """Ends all operations on all members, and destroys the group.

        No operation writes to memory after it, unless torch does not end it within `ABORT_SECONDS`.

        Args:
            error: What the operations of this member fail with.
        """
        group, connections = self._group, self._connections
        if group is None:
            return
        self.operations.fail(error)  # first: NCCL ends its operations as if they were complete
        if self._witness is not None:
            self._witness.abort(error)  # ends a confirmation
            _bounded(group.abort)
        elif connections is not None:
            connections.cut()
        else:
            group.close(str(error))
        self._connections = None  # its device ends with the group, though a traceback may keep this ring
        with self._exchange_ended:
            ended = self._exchange_ended.wait_for(lambda: not self._exchanges, ABORT_SECONDS)
        if self.operations.end_thread(ABORT_SECONDS) and ended:
            self._release(group)  # its destructor waits for all operations, which Gloo seldom forgets to end
        self._group = None

    def close(self) -> None:
        """Closes the connections, unless the ring has failed. Can be called twice.

        With a witness, no operation may be pending that counts.
        """
        if self._witness is not None:
            if not self.operations.failed:
                self._witness.leave()
            self.abort(RingBroken("this worker has left the ring"))
            return
        group, self._group = self._group, None
        if group is None:
            return
        self.operations.close()
        if isinstance(group, HostGroup | TwoLevels):
            group.close(f"rank {self.rank} has left the ring")
        if self.on_host is None and not self.operations.failed:
            if self.device.type == "cuda":
                group.shutdown()  # NCCL warns of a group that is only dropped
            self._release(group)
        self.operations.fail(RingBroken("this worker has left the ring"))

    def _release(self, group: Any) -> None:
        for kept in () if self.on_host is not None else (group, self._store):
            _python.Py_DecRef(kept)

    def _gather_padded(self, what: str, data: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self.device)
        padded[: data.numel()] = data
        if not padded.numel():
            return [padded] * self.size
        return [one[:length] for one, length in zip(self._gather_equal(what, padded), lengths, strict=True)]

    def _gather_equal(self, what: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self.run(what, lambda group: group.allgather([parts], [tensor]))
        return parts


def _bounded(abort: Callable[[], None]) -> None:
    """Calls NCCL's abort, and leaves it behind if it does not end within `ABORT_SECONDS`."""

    def attempt() -> None:
        try:
            abort()
        except RuntimeError as error:
            log.warning("NCCL did not end its operations: %s", gist(error))

    thread = threading.Thread(target=attempt, name="NCCL abort", daemon=True)
    thread.start()
    thread.join(ABORT_SECONDS)


LEAVE_SECONDS = 2.0
"""How long a member that leaves waits for the others."""


class Witness:
    """One member's side.

    Args:
        ring: A ring over Gloo for this only, which can be aborted.

    Attributes:
        watch: Fails when a member is lost or leaves. Otherwise it does not end.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self.watch = RingWork("the watch over the ring")
        before = (ring.rank - 1) % ring.size
        if before != ring.rank:
            ring.start(
                self.watch,
                lambda group: group.recv([torch.zeros(1, dtype=torch.float32, device="cpu")], before, 0),
            )

    def confirm(self) -> None:
        """Waits until all members have called it as often.

        Raises:
            RingBroken: A member is lost, leaves, or has aborted.
        """
        if self._count_leavers(leaves=False):
            raise RingBroken("a member of the ring leaves before this operation has ended")

    def leave(self) -> None:
        """Waits until all members leave, at most `LEAVE_SECONDS`; call it before `abort`.

        A member that has ended its last operation may otherwise fail the confirmation of one that has not.
        """

        def until_all_leave() -> None:
            with suppress(HubringError):
                self._count_leavers(leaves=True)

        thread = threading.Thread(target=until_all_leave, name="leaving the ring", daemon=True)
        thread.start()
        thread.join(LEAVE_SECONDS)

    def _count_leavers(self, *, leaves: bool) -> int:
        """Returns how many members leave, once all have called this."""
        leavers = torch.tensor([float(leaves)], dtype=torch.float32, device="cpu")
        self._ring.exchange(Work("a confirmation"), lambda group: group.allreduce([leavers]))
        return int(leavers.item())

    def abort(self, error: HubringError) -> None:
        """Closes the connections, which all members notice."""
        self._ring.abort(error)

"""A torch.distributed process group whose operations are Works.

Gloo notices within milliseconds that a peer's connection is closed. It does not notice a peer
that is stopped or unreachable, and an operation cannot be cancelled. Then the code that watches
the ranks calls `fail`. A failed group is never destroyed: destroying it waits for the pending
operation or aborts the process, even at exit.

NCCL's operations wait without end for a lost member. When they are aborted they end as if they were complete,
and the last signals of an aborted operation can also end those of other members, with wrong sums. So each
member keeps a receive over Gloo pending, which fails when its neighbor's connection closes, and an operation
counts once all members have reported over Gloo that theirs has ended. See `Witness`.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from hubring.ps.core.errors import HubringError, RingBroken
from hubring.ps.core.work import Work
from hubring.workers.communicators.ring.group import GroupConnections, gist, open_group
from hubring.workers.communicators.ring.work import ConfirmedWait, Operations, RingWork

log = logging.getLogger(__name__)

Launch = Callable[[Any], Any]
"""Starts one operation on a process group and returns torch's handle."""

FOREVER = timedelta(days=3650)
"""Longer than any job."""

ABORT_SECONDS = 10.0
"""How long operations may take to notice that their connections are cut; a group that does not is left."""

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
        backend: `gloo` or `nccl`.
        device: Device of the tensors.
        host: This process's address for the other ranks.
        timeout: Seconds that connecting, and each operation, may take.
        patient: Whether operations have no timeout. Connecting still has one.
        connect_timeout: Seconds that connecting may take; None: `timeout`.
        abortable: Whether `abort` may be called; with `nccl` it needs a witness.
        witness: Notices lost members for a ring over NCCL, which aborts it in the end. Operations are then
            done once they have ended on all members, also on a GPU.

    Raises:
        ConfigError: The backend is not available, or does not support the device.
        RingBroken: The ranks could not connect to each other.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        *,
        backend: str,
        device: torch.device,
        host: str,
        timeout: float,
        patient: bool = False,
        connect_timeout: float | None = None,
        abortable: bool = False,
        witness: Witness | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.timeout = None if patient else timeout
        self._connections = GroupConnections(host) if abortable and backend == "gloo" else None
        self._witness = witness
        watch = witness.watch if witness is not None else None
        # Half of the time: the ring heals before callers give up.
        wait = RingWork.settle if witness is None else ConfirmedWait(device, witness.confirm, timeout / 2)
        limit = connect_timeout or timeout
        self._group = open_group(rank, size, store, backend, device, host, limit, self._connections, watch)
        self.operations = Operations(rank, wait)  # its thread would stay if the ranks could not connect
        if watch is not None:
            watch.when_done(lambda ended: self.fail(RingBroken(str(ended.error))) if ended.error else None)
        if patient or connect_timeout is not None:
            self._group.set_timeout(FOREVER if patient else timedelta(seconds=timeout))
        self._store = store
        self._exchanges, self._exchange_ended = 0, threading.Condition()
        """How many calls of `exchange` wait for torch."""
        for kept in (self._group, store):  # never destroy them, unless `close` drops this reference
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
        work = RingWork(what)
        self.start(work, launch)
        work.wait(self.timeout)

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

    def fail(self, error: HubringError) -> None:
        """Fails all current and later operations. Safe to call from any thread."""
        self.operations.fail(error)

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
        else:
            assert connections is not None
            connections.cut()
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
        if not self.operations.failed:
            if self.device.type == "cuda":
                group.shutdown()  # NCCL warns of a group that is only dropped
            self._release(group)
        self.operations.fail(RingBroken("this worker has left the ring"))

    def _release(self, group: Any) -> None:
        for kept in (group, self._store):
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

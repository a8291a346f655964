"""One member of a group: it joins the job, starts operations in the group's lane, and leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistBackendError
from torch.distributed.distributed_c10d import Store

from hubring.workers.communicators.host import meeting
from hubring.workers.communicators.host.base import GroupExchange
from hubring.workers.communicators.host.shared_memory import HostExchange
from hubring.workers.torch_backend import job
from hubring.workers.torch_backend.exchange import HubGroupExchange
from hubring.workers.torch_backend.point_to_point import Mailbox, OnEnd
from hubring.workers.torch_backend.staging import Staged, staged
from hubring.workers.torch_backend.works import GroupWork, Lane

Tensors = Sequence[Tensor]


class GroupMember:
    """This process in a group."""

    def open(self, name: str, store: Store, ranks: Sequence[int], own: int, timeout: timedelta) -> None:
        """Joins the job if this is the first group.

        Args:
            name: The group's name, the same for all members.
            store: The group's store.
            ranks: The members' ranks in torch.distributed's world, in the group's order.
            own: This process's rank in the group.
            timeout: How long an operation may take.
        """
        self._called, self._store, self._world_ranks, self._own = f"group {name}", store, tuple(ranks), own
        self._timeout = timeout.total_seconds()
        self._lane = Lane(self._called)
        self._count = 0
        self._open = True
        self._exchange: GroupExchange | None = None
        self._mailbox: Mailbox | None = None
        self._place: job.JobPlace | None = None
        if len(ranks) == 1:
            self._exchange = HostExchange(
                self._called, 0, torch.empty(0, dtype=torch.uint8, device="cpu"), {}
            )
            return
        self._place = job.enter(store, ranks, own, self._timeout)
        try:
            communicator, members = self._place
            self._mailbox = Mailbox(communicator, job.own_part(store, own), self._called, members, own)
            if len(ranks) == communicator.size:  # of other groups, many are never used
                self._start("connect", lambda: None, [], [], None).wait()
            else:
                communicator.open_group(tuple(sorted(members)))
        except BaseException as error:  # the script gets no group to destroy
            reason = f"{self._called} was not made: {error}"
            self._close(reason, reason)
            raise

    def getBackendName(self) -> str:
        return "hubring"

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()

    def abort(self) -> None:
        reason = f"rank {self._world_ranks[self._own]} aborted {self._called}"
        self._close(reason, reason)

    def shutdown(self) -> None:
        self._close(f"rank {self._world_ranks[self._own]} left {self._called}")

    def _get_sequence_number_for_group(self) -> int:
        return self._count

    def _set_sequence_number_for_group(self) -> None:
        """Counts from 0, as all members do."""

    def _close(self, reason: str, error: str = "") -> None:
        if not self._open:
            return
        self._open = False
        self._lane.close(DistBackendError(reason))
        for part in (self._exchange, self._mailbox):
            if part is not None:
                part.close(reason)
        if self._place is not None:
            job.leave(error)

    def _start(
        self, what: str, run: Callable[[], None], parts: Sequence[Staged], tensors: Tensors, opts: Any
    ) -> GroupWork:
        self._count += 1
        seconds = self._seconds(opts)

        def exchange() -> None:
            for part in parts:
                part.await_copy()
            self._connected(seconds).timeout = seconds
            run()
            for part in parts:
                part.land()

        work = GroupWork(f"{what} in {self._called}", tensors, seconds)
        return self._lane.start(work, exchange, here=not getattr(opts, "asyncOp", True))

    def _message(
        self,
        what: str,
        tensors: Tensors,
        start: Callable[[Mailbox, Tensor, OnEnd], None],
        *,
        sends: bool = False,
    ) -> GroupWork:
        (part,) = staged(tensors, read=sends, write=not sends)
        if self._mailbox is None:
            raise ValueError(f"{what}: the group has only one rank")
        self._count += 1
        work = GroupWork(f"{what} in {self._called}", tensors, self._timeout)

        def end(error: BaseException | None, sender: int) -> None:
            try:
                if error is None:
                    part.land()
            except Exception as failure:  # any error: a caller waits for the work
                error = failure
            work.finish(error, sender)

        part.await_copy()
        start(self._mailbox, part.data, end)
        return work

    def _connected(self, seconds: float = 0.0) -> GroupExchange:
        """Returns the exchange; at the first operation, connects the members within `seconds`."""
        if self._exchange is None:
            assert self._place is not None, "a group of one has its exchange"
            communicator, ranks = self._place
            self._exchange = hub = HubGroupExchange(communicator, self._called, ranks, self._own)
            hub.timeout = seconds
            others = [rank for rank in ranks if rank != communicator.rank]
            watch = meeting.Watch(communicator, self._called, communicator.rank, others)
            near = meeting.connect(hub.gather, self._called, self._world_ranks, self._own, watch.lost)
            self._exchange = near or hub
        return self._exchange

    def _seconds(self, opts: Any) -> float:
        timeout = getattr(opts, "timeout", None)
        given = timeout.total_seconds() if timeout is not None else 0.0
        return given if given > 0 else self._timeout

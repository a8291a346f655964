"""Collectives of a hub's workers that are all on one host: without the hub, until one is lost or joins.

The workers meet through the hub at their first collective. Then they schedule collectives as the members of a
ring do. Operations whose results differ by worker go on to the hub, and so do groups, sends and receives.

Law: all workers leave the hub for the same collectives, and come back at the same one. A worker that cannot
connect, loses another, or sees a join, takes part in the hub's rounds of `_SETTLING`, and so do all others.
They show who has the most results, and which. With these each worker ends the calls that lacked them. All
other calls, and all later ones, are the hub's. A worker in the place of one that was lost before the first
step repeats all calls: the hub keeps its first rounds, so this worker gets the results of `_SETTLING` too.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hubring.ps.core.errors import ConfigError, HubringError, RingBroken
from hubring.ps.core.messages import Call, Collective
from hubring.ps.core.work import Work
from hubring.ps.store.collective import layout_of
from hubring.workers.communicators.base import CollectiveWork, Communicator
from hubring.workers.communicators.host import meeting
from hubring.workers.communicators.ring.host_group import HostGroup
from hubring.workers.communicators.ring.process_group import Ring
from hubring.workers.communicators.ring.results import CallResult, CallResults, results_of
from hubring.workers.communicators.ring.scheduler import PendingCall, RingScheduler

TakePart = Callable[[Call, tuple[Tensor, ...], CollectiveWork], None]
"""As `Communicator.take_part`."""

_MEETING, _SETTLING = "workers on one host", "what the workers on one host have done"
KEPT_BYTES = 64 << 20
"""The most that kept results may need, as the hub keeps its own."""
_LATE = -1
"""How many results a worker has that came later."""


class HostCollectives:
    """One worker's collectives.

    Args:
        communicator: Connects the worker to all others.
        hub: Passes a call to the hub.
    """

    def __init__(self, communicator: Communicator, hub: TakePart) -> None:
        self._communicator, self._hub = communicator, hub
        self._lock = threading.RLock()
        self._waiting: list[PendingCall] = []
        """Calls until it is clear which way they go."""
        self._through_hub = communicator.late or communicator.size == 1
        self._thread: threading.Thread | None = None
        """Meets the other workers, and waits until it loses one. It starts at the first call."""
        self._scheduler: RingScheduler | None = None
        self._results = CallResults(KEPT_BYTES)
        self._given: defaultdict[str, deque[CallResult]] = defaultdict(deque)
        """Results of later calls, of a worker in a lost one's place."""
        self._replaces = False
        """Whether this worker is in the place of one that was lost before the first step."""
        self._error: HubringError | None = None

    def take_part(self, call: Call, tensors: tuple[Tensor, ...], work: CollectiveWork) -> None:
        """See `Communicator.take_part`."""
        if call.ranks:
            self._hub(call, tensors, work)
            return
        with self._lock:
            if self._error is not None:
                work.fail(self._error)
                return
            if self._thread is None and self._communicator.size > 1:
                self._thread = threading.Thread(target=self._meet, name="workers on one host", daemon=True)
                self._thread.start()
            if self._scheduler is not None:
                self._scheduler.take_part(call, tensors, work)
            elif self._through_hub:
                self._finish(PendingCall(call, tensors, work))
            else:
                self._waiting.append(PendingCall(call, tensors, work))

    @property
    def waits(self) -> bool:
        """Whether a collective waits for other workers."""
        scheduler = self._scheduler
        return scheduler is not None and scheduler.waits

    def fail(self, error: HubringError) -> None:
        """Fails all calls, and all later ones. Safe to call from any thread."""
        with self._lock:
            self._error = self._error or error
            scheduler = self._stop_on_host()
            calls, self._waiting = self._waiting, []
        if scheduler is not None:
            scheduler.ring.fail(error)
            calls += scheduler.end(error)
            scheduler.ring.close()
        for one in calls:
            one.work.fail(error)

    def _stop_on_host(self) -> RingScheduler | None:
        """Keeps later calls back. Returns the scheduler once."""
        with self._lock:
            scheduler, self._scheduler = self._scheduler, None
            return scheduler

    def _meet(self) -> None:
        torch.get_num_threads()  # without this call, MKL uses every core in this thread (torch 2.13)
        try:
            if self._communicator.late:
                self._settle()  # the others may wait for it
            elif not self._exchange_on_host():
                self._go_on_through_hub([])
        except HubringError as error:  # the job has failed, or this worker leaves
            if not self._communicator.late:
                self.fail(error)
        except Exception as error:  # any error: callers wait for this thread
            self.fail(HubringError(f"rank {self._communicator.rank} cannot use its host's memory: {error!r}"))

    def _exchange_on_host(self) -> bool:
        """Runs collectives without the hub until they go back to it; returns False if no worker has any."""
        own, size = self._communicator.rank, self._communicator.size
        watch = meeting.Watch(self._communicator, _MEETING, own, [one for one in range(size) if one != own])
        try:
            exchange = meeting.connect(self._gather, "the job", range(size), own, watch.lost)
        except RingBroken:
            self._settle()
            return True
        if exchange is None:
            return False
        ring = Ring(own, size, group=HostGroup(exchange, size), patient=True)
        with self._lock:
            if self._error is not None:
                ring.close()
                return True
            self._scheduler = scheduler = RingScheduler(ring, range(size), self._results, self._hub)
            for one in self._waiting:
                one.work.waits = False  # its caller may wait already
                scheduler.take_part(one.call, one.tensors, one.work)
            self._waiting.clear()
        exchange.await_end()
        if self._stop_on_host() is None:  # this worker fails or leaves
            return True
        rest = scheduler.end(RingBroken("a worker is lost, has left, or has joined"))
        ring.close()
        with self._lock:
            self._waiting = rest + self._waiting
        self._settle()
        return True

    def _gather(self, own: bytes) -> Sequence[bytes]:
        """Returns what all workers pass; empty bytes for those that are not there."""
        rank, size = self._communicator.rank, self._communicator.size
        found = meeting.by_rank(self._ask(_MEETING, meeting.row_of(rank, own)))
        if found[rank] != own:  # the hub has kept what the worker before this one passed
            if self._replaces and meeting.APART not in found.values():
                raise RingBroken("this worker is in the place of one that is lost")
            self._replaces = True
            found = {} if meeting.APART not in found.values() else found
        return [found.get(one, b"") for one in range(size)]

    def _settle(self) -> None:
        """Ends calls with the results that other workers have, and passes all others to the hub.

        Raises:
            RingBroken: This worker is in the place of one that had more results than are kept.
        """
        rank, own = self._communicator.rank, _LATE if self._communicator.late else self._results.count
        given = nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        while not given.numel():  # again if the worker that has the results is lost in between
            counts = self._ask(f"{_SETTLING}: counts", torch.tensor([[rank, own]], device="cpu"))
            known = {other: count for other, count in counts.tolist() if count != _LATE}
            if not known:
                break
            most, least = max(known.values()), min(known.values())
            gives = rank == next(other for other, count in known.items() if count == most)
            data = self._results.after(0 if self._results.complete else least) if gives else nothing
            given = self._ask(f"{_SETTLING}: results", data)
        found = results_of(given) if given.numel() and own != _LATE else []
        lacked = [one for one in found if one.number > own]
        if lacked and lacked[0].number > own + 1:
            raise RingBroken(f"rank {rank} cannot repeat what the worker before it has done: restart the job")
        self._go_on_through_hub(lacked)

    def _go_on_through_hub(self, results: Sequence[CallResult]) -> None:
        with self._lock:
            self._through_hub = True
            for result in results:
                self._given[result.name].append(result)
            calls, self._waiting = self._waiting, []
            for one in calls:
                self._finish(one)
            if not self._replaces:  # what is left was run without this worker's call
                self._given.clear()

    def _finish(self, one: PendingCall) -> None:
        """Ends a call with its result if it is known, or passes it to the hub."""
        if not self._given[one.call.name]:
            self._hub(one.call, one.tensors, one.work)
            return
        result = self._given[one.call.name].popleft()
        if result.refusal:
            one.work.fail(ConfigError(result.refusal))
        else:
            one.work.deliver(result.tensors)

    def _ask(self, name: str, rows: Tensor) -> Tensor:
        """Returns all workers' rows, from the hub. Waits without a limit, and reports nothing."""
        call = Call(Collective.ALLGATHER, name, layouts=(layout_of(rows),))
        work = CollectiveWork(call, list, self._communicator)
        self._hub(call, (rows,), work)
        work.attend = None
        Work.wait(work)
        whole: Tensor = work.result[0]
        return whole
